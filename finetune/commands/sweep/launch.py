"""The command that starts each run, and its share of the machine's devices and threads."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from finetune.commands.sweep.axes import override_of
from finetune.commands.sweep.runs import SweepRun
from finetune.config.load import LoadedConfig, read_text
from finetune.config.yaml import read_yaml
from finetune.errors import UserError
from finetune.launch.child import train_command
from finetune.runtime.processes import free_port
from finetune.runtime.resources import usable_cores

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_SHUTDOWN_SECONDS = "600"
"""Time for ranks to save after SIGTERM, unless the environment sets it; torchelastic's default is 30 s."""

_COUNT_DEVICES = "import torch; print(torch.cuda.device_count())"


@dataclass(frozen=True)
class LaunchPlan:
    """The processes, the launcher and the devices of each run."""

    job: Path
    num_processes: int
    accelerate_config: Path | None
    at_once: int
    devices: tuple[str, ...]  # names for CUDA_VISIBLE_DEVICES; empty on a machine without devices
    num_cores: int

    def command(self, run: SweepRun, loaded: LoadedConfig) -> list[str]:
        """Return the command that trains the run, or resumes it; with a free port."""
        return train_command(
            self.job,
            overrides=[*run.overrides, *own_overrides(run, loaded)],
            accelerate_config=self.accelerate_config,
            num_processes=self.num_processes,
            port=free_port(),
        )

    def environment(self, slot: int) -> dict[str, str]:
        """Return the devices and threads of a run in this slot, as environment variables."""
        share = max(1, self.num_cores // (self.at_once * self.num_processes))
        chosen = {"OMP_NUM_THREADS": str(share), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": _SHUTDOWN_SECONDS}
        variables = {name: os.environ.get(name) or value for name, value in chosen.items()}
        if self.devices:
            first = slot * self.num_processes
            own = [self.devices[(first + rank) % len(self.devices)] for rank in range(self.num_processes)]
            variables[VISIBLE_DEVICES] = ",".join(own)
        return variables


def own_overrides(run: SweepRun, loaded: LoadedConfig) -> list[str]:
    """Return the overrides that the sweep adds to every run: its folder, and to resume from its own checkpoints.

    A job that starts from another checkpoint (`checkpoint.resume`) does so until the run has its own.
    """
    texts = [override_of("run.folder", str(run.folder.absolute()))]
    if loaded.config.run.local_folder is not None:
        texts.append("run.local_folder=null")
    starts_elsewhere = loaded.config.checkpoint.resume not in ("auto", "never")
    if not starts_elsewhere or any((run.folder / "checkpoints").glob("step-*")):
        texts.append("checkpoint.resume=auto")
    return texts


def plan_launch(
    job: Path, *, num_processes: int | None, accelerate_config: Path | None, at_once: int | None
) -> LaunchPlan:
    """Return the plan for launching the runs; raises UserError if this machine cannot run them.

    The default number at once is devices / processes, or one on a machine without devices.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("sweep: start it without a launcher. It launches each run itself; see --accelerate.")
    declared = 1 if accelerate_config is None else _declared_processes(accelerate_config)
    processes = num_processes or declared
    devices = visible_devices(os.environ)
    if devices and processes > len(devices):
        raise UserError(
            f"--processes-per-run {processes}: this machine has {len(devices)} devices. Lower the number, or set "
            f"{VISIBLE_DEVICES} to an empty string to train on the CPU."
        )
    slots = at_once or (len(devices) // processes if devices else 1)
    return LaunchPlan(job, processes, accelerate_config, slots, devices, usable_cores())


def visible_devices(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the devices that this command may use, as CUDA_VISIBLE_DEVICES names them, or as torch counts them."""
    named = variables.get(VISIBLE_DEVICES)
    if named is not None:
        names = [name.strip() for name in named.split(",")]
        return tuple(name for name in names if name and name != "-1")
    counted = subprocess.run([sys.executable, "-c", _COUNT_DEVICES], capture_output=True, text=True, check=False)
    count = counted.stdout.strip()
    return tuple(map(str, range(int(count)))) if count.isdigit() else ()


def _declared_processes(path: Path) -> int:
    """Return `num_processes` of an accelerate config; raises UserError for one that needs several machines."""
    try:
        document = read_yaml(read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--accelerate {path}: the file cannot be read: {error}.") from error
    values = document.values if isinstance(document.values, dict) else {}
    if document.problems or not values.keys() & {"distributed_type", "num_processes", "compute_environment"}:
        raise UserError(f"--accelerate {path}: this is not an accelerate config, a YAML file with its settings.")
    machines = values.get("num_machines", 1)
    if machines != 1:
        raise UserError(
            f"--accelerate {path}: num_machines is {json.dumps(machines)}. A sweep starts runs on this machine only."
        )
    processes = values.get("num_processes", 1)
    return processes if isinstance(processes, int) and processes > 0 else 1
