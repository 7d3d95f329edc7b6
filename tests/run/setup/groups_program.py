"""Prepares a job's model as a run does, and writes the timeout of every process group of this rank to a file.

python groups_program.py JOB.yaml FILE [KEY=VALUE ...]
"""

import sys
from pathlib import Path

import torch.distributed as dist

from finetune.config.load import load_config
from finetune.run.setup.accelerator import make_accelerator
from finetune.run.setup.build import prepare_model
from finetune.run.setup.training_data import prepare_data
from finetune.run.train import validate
from finetune.runtime import distributed
from finetune.runtime.files import atomic


def group_timeouts() -> list[dict]:
    """Return name, backends and shortest timeout in seconds of each group that this rank is in."""
    found = []
    for group, (backend, _) in dist.distributed_c10d._world.pg_map.items():
        options = [group._get_backend(device).options for device in group._device_types]
        found.append(
            {
                "name": group.group_desc,
                "backend": backend,
                "seconds": min(each._timeout.total_seconds() for each in options),
                "is_own": group in distributed._groups.values(),
            }
        )
    return found


def main() -> None:
    job, file, *overrides = sys.argv[1:]
    context = validate(load_config(Path(job), overrides))
    data = prepare_data(context)
    accelerator = make_accelerator(context.config, context.strategy, log=context.log)
    prepare_model(context.loaded, context.strategy, data, accelerator=accelerator, log=context.log, trains=False)
    if distributed.is_main():
        atomic.write_json(Path(file), group_timeouts())
    distributed.shut_down(0)


if __name__ == "__main__":
    main()
