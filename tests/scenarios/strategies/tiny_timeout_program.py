"""`python -m finetune` where torch's default group gives up after FINETUNE_TEST_TIMEOUT seconds.

Rank 0 takes FINETUNE_TEST_LOADING seconds longer than the others to load the model. On a machine with a GPU all
processes share it, over gloo: NCCL takes one rank on each.
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType

VARIABLE = "FINETUNE_TEST_TIMEOUT"
LOADING = "FINETUNE_TEST_LOADING"


def use_tiny_timeout() -> None:
    """Shorten the default group's timeout once the group is there."""
    make = dist.init_process_group

    def make_impatient(*values, **named):
        make(*values, **named)
        seconds = float(os.environ.get(VARIABLE) or "nan")
        if seconds == seconds:  # it is set
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)

    dist.init_process_group = make_impatient


def load_slowly() -> None:
    """Have rank 0 keep the others waiting with the model that it has loaded."""
    from finetune.run.setup import build as run_build

    build = run_build.build_model

    def build_slowly(*values, **named):
        model = build(*values, **named)
        if dist.get_rank() == 0:
            time.sleep(float(os.environ[LOADING]))
        return model

    run_build.build_model = build_slowly


def share_one_gpu() -> None:
    """Have Accelerate choose gloo for processes with a GPU."""
    if torch.cuda.is_available():
        os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
        PartialState._prepare_backend = lambda self, *_, **__: ("gloo", DistributedType.MULTI_GPU)


if __name__ == "__main__":
    from finetune.__main__ import main

    share_one_gpu()
    use_tiny_timeout()
    if os.environ.get(LOADING):
        load_slowly()
    main()
