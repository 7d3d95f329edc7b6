"""Errors that the model's own code raises in a forward pass: one message instead of a traceback."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from finetune.errors import FinetuneError, ModelError
from finetune.run.build.microbatch.limits import is_out_of_memory

_MODEL_CODE = ("/transformers/models/", "/transformers_modules/")
_NOT_THE_MODEL = ("/finetune/", "/torch/distributed/", "/torch/_dynamo/", "/torch/_inductor/", "/deepspeed/")
"""Code that a model's code may call, whose errors are not the model's."""


@contextmanager
def model_code_errors() -> Iterator[None]:
    """Raise ModelError for what the code of the model raises: it does not accept the inputs of this job.

    A device error, one out of memory, of another rank or of ours, is raised as it is.
    """
    try:
        yield
    except (FinetuneError, OSError, torch.AcceleratorError):
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        paths = [Path(frame.filename).as_posix() for frame in frames]
        last = max((at for at, path in enumerate(paths) if any(part in path for part in _MODEL_CODE)), default=None)
        is_other = last is None or any(part in path for path in paths[last:] for part in _NOT_THE_MODEL)
        if last is None or is_other or is_out_of_memory(error) or "CUDA" in str(error):
            raise
        lines = str(error).strip().splitlines() or [""]
        raise ModelError(
            f"the model's own code cannot compute this job: {type(error).__name__}: {lines[0][:300]} "
            f"({Path(paths[last]).name}, line {frames[last].lineno}). It may not support the task, or may need another "
            "tokenizer or other values in its config."
        ) from error
