"""Names of the subfolders of a run folder."""

CHECKPOINTS_FOLDER = "checkpoints"
FINAL_FOLDER = "final"
"""The exported model of a finished run."""

FAILED_FINAL_FOLDER = "final.failed"
"""An export that differed from the trained model, renamed."""

HANG_FOLDER = "hang"
"""The stacks of all ranks, written when a run hangs."""

INPUTS_FOLDER = "inputs"
"""Tokenizer, processor and label names, so that a checkpoint can be exported without the data."""

SAMPLES_FOLDER = "samples"
PROFILE_FOLDER = "profile"
"""The traces of all ranks, a folder for each window of steps."""

FOLDERS = (CHECKPOINTS_FOLDER, SAMPLES_FOLDER, INPUTS_FOLDER, FINAL_FOLDER, HANG_FOLDER, PROFILE_FOLDER)
