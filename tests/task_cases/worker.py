"""Runs one job after another in the same processes: `accelerate launch worker.py SPEC.json`.

A spec is a list of `{"job": path, "overrides": [...]}`. Starting processes costs most of a tiny job's time, so the jobs
share them. Each leaves its run folder; one that fails leaves `error.txt` there and the others go on, unless it is an
error of ours on one rank alone, which ends the launch as it would end a run.
"""

import gc
import json
import sys
import traceback
from pathlib import Path
from unittest.mock import patch

import torch

from finetune.config.load import load_config
from finetune.errors import FinetuneError
from finetune.run.train import train_from_config
from finetune.runtime import distributed
from tests.scenarios.trained import forget


def main(spec: str) -> None:
    for each in json.loads(Path(spec).read_text()):
        loaded = load_config(Path(each["job"]), each["overrides"])
        try:
            with patch.object(distributed, "shut_down", stay):
                train_from_config(loaded)
        except FinetuneError as error:
            Path(loaded.config.run.folder).mkdir(parents=True, exist_ok=True)
            (Path(loaded.config.run.folder) / "error.txt").write_text(f"{error}\n{traceback.format_exc()}")
        forget()
        gc.collect()
    distributed.shut_down(0)


def stay(code: int, **_: object) -> int:
    """Take the place of `distributed.shut_down`: the others are waited for, and the group goes on."""
    if distributed.is_distributed():
        torch.distributed.barrier()
    return code


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
