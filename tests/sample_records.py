"""Reads the record of the samples that the steps of a run have consumed."""

from pathlib import Path

from finetune.runtime.files import atomic
from finetune.runtime.run_folder import SAMPLES_FOLDER


def read_samples(run_folder: Path) -> dict[int, list[list[list[int]]]]:
    """Return the record by step: each rank's microbatches, each of which lists its sample ids."""
    microbatches_by_step: dict[int, list[list[list[int]]]] = {}
    for path in sorted((run_folder / SAMPLES_FOLDER).glob("rank-*.jsonl")):
        for line in atomic.read_json_lines(path):
            microbatches_by_step.setdefault(line["step"], []).append(line["microbatches"])
    return microbatches_by_step
