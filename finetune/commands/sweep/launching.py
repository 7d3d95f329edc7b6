"""How the runs of a sweep are launched on the devices of this machine, and the signals that stop them."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from finetune.commands.rehearse.accelerate_file import read_accelerate_file
from finetune.commands.sweep.runs import SweepRun, own_overrides
from finetune.config.load import LoadedConfig
from finetune.errors import UserError
from finetune.launch.child import train_command
from finetune.runtime.processes import free_loopback_port
from finetune.runtime.resources import usable_cores

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_SHUTDOWN_SECONDS = "600"
"""Time for ranks to save after SIGTERM, unless the environment sets it; torchelastic's default is 30 s."""

_COUNT_DEVICES = "import torch; print(torch.cuda.device_count())"

Start = Callable[..., Any]
"""Starts a command, with the signature of `start_child`, and returns a process that is polled and sent signals."""


@dataclass(frozen=True)
class LaunchPlan:
    """The processes, the launcher and the devices of each run."""

    job: Path
    num_processes: int
    accelerate_config: Path | None
    at_once: int
    devices: tuple[str, ...]  # names for CUDA_VISIBLE_DEVICES; empty on a machine without devices
    num_cores: int
    data_parallel_size: int = 1  # microbatches that a run computes at a time

    def command(self, run: SweepRun, loaded: LoadedConfig) -> list[str]:
        """Return the command that trains the run, or resumes it; with a free port."""
        return train_command(
            self.job,
            overrides=[*run.overrides, *own_overrides(run, loaded)],
            accelerate_config=self.accelerate_config,
            num_processes=self.num_processes,
            port=free_loopback_port(),
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


def plan_launch(
    job: Path, *, num_processes: int | None, accelerate_config: Path | None, at_once: int | None
) -> LaunchPlan:
    """Return the plan for launching the runs; raises UserError if this machine cannot run them.

    The default number at once is devices / processes, or one on a machine without devices.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("sweep: start it without a launcher. It launches each run itself; see --accelerate.")
    processes, sequence_size = num_processes or 1, 1
    if accelerate_config is not None:
        file = read_accelerate_file(accelerate_config)
        if file.num_machines > 1:
            raise UserError(
                f"--accelerate {accelerate_config}: num_machines is {file.num_machines}. A sweep starts each run on "
                "one machine."
            )
        processes, sequence_size = num_processes or file.num_processes, file.num_processes // file.data_parallel_size
    devices = visible_devices(os.environ)
    if devices and processes > len(devices):
        raise UserError(
            f"--processes-per-run {processes}: this machine has {len(devices)} devices. Lower the number, or set "
            f"{VISIBLE_DEVICES} to an empty string to train on the CPU."
        )
    slots = len(devices) // processes if devices else 1
    size = processes // sequence_size
    return LaunchPlan(job, processes, accelerate_config, at_once or slots, devices, usable_cores(), size)


def visible_devices(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the devices that this command may use, as CUDA_VISIBLE_DEVICES names them, or as torch counts them."""
    named = variables.get(VISIBLE_DEVICES)
    if named is not None:
        names = [name.strip() for name in named.split(",")]
        return tuple(name for name in names if name and name != "-1")
    counted = subprocess.run([sys.executable, "-c", _COUNT_DEVICES], capture_output=True, text=True, check=False)
    count = counted.stdout.strip()
    return tuple(map(str, range(int(count)))) if count.isdigit() else ()


@dataclass
class StopSignals:
    """The first of SIGINT, SIGTERM and SIGHUP that was received; after a second SIGINT it is urgent."""

    first: signal.Signals | None = None
    is_urgent: bool = False

    def record(self, number: int, frame: FrameType | None = None) -> None:
        """Record the signal."""
        self.is_urgent = self.first is not None and number == signal.SIGINT
        self.first = self.first or signal.Signals(number)


@contextmanager
def recorded_signals() -> Iterator[StopSignals]:
    """Record these signals in the context; an ignored SIGHUP stays ignored."""
    stop = StopSignals()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ignored = {number for number in numbers[1:] if signal.getsignal(number) is signal.SIG_IGN}
    before = {number: signal.signal(number, stop.record) for number in numbers if number not in ignored}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
