"""How the runs of a sweep are launched, here or on the hosts of a Ray cluster, and the signals that stop them.

On Ray each run is a child process of an actor, which holds its GPUs. A run writes its own files to the folder of the
sweep, which all hosts share. When its host is lost the sweep starts it again, and it resumes from its checkpoint.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from finetune.commands.rehearse.accelerate_file import read_accelerate_file
from finetune.commands.sweep.runs import LOCK_FILE, SweepRun, own_overrides
from finetune.config.load import LoadedConfig
from finetune.errors import UserError
from finetune.launch.child import kill_child, start_child, train_command
from finetune.launch.ray import connect_to_ray
from finetune.runtime.processes import free_loopback_port
from finetune.runtime.resources import usable_cores

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_SHUTDOWN_SECONDS = "600"
"""Time for ranks to save after SIGTERM, unless the environment sets it; torchelastic's default is 30 s."""

_COUNT_DEVICES = "import torch; print(torch.cuda.device_count())"

Start = Callable[..., Any]
"""Starts a command, with the signature of `start_child`, and returns a process that is polled and sent signals."""

LOST_HOST = -1000
"""Exit code of a process whose host is lost: the run is started again."""


@dataclass(frozen=True)
class HostResources:
    """The resources of a host of a Ray cluster for runs."""

    num_cores: int
    num_gpus: int


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
    job: Path,
    *,
    num_processes: int | None,
    accelerate_config: Path | None,
    at_once: int | None,
    hosts: Sequence[HostResources] | None = None,
) -> LaunchPlan:
    """Return the plan for launching the runs; raises UserError if this machine, or no host, can run them.

    The default number at once is devices / processes, or one on a machine without devices. On hosts of a Ray cluster
    it is the number for which there are GPUs, or on a cluster without GPUs cores; Ray gives them to each run.
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
    devices: tuple[str, ...] = ()
    if hosts is not None:
        num_cores = sum(host.num_cores for host in hosts)
        has_gpus = any(host.num_gpus for host in hosts)
        free = [host.num_gpus if has_gpus else host.num_cores for host in hosts]
        if processes > max(free):
            raise UserError(
                f"--processes-per-run {processes}: the largest host of the Ray cluster has {max(free)} "
                f"{'GPUs' if has_gpus else 'cores'}. Lower the number."
            )
        slots = sum(count // processes for count in free)
    else:
        devices, num_cores = visible_devices(os.environ), usable_cores()
        if devices and processes > len(devices):
            raise UserError(
                f"--processes-per-run {processes}: this machine has {len(devices)} devices. Lower the number, or set "
                f"{VISIBLE_DEVICES} to an empty string to train on the CPU."
            )
        slots = len(devices) // processes if devices else 1
    size = processes // sequence_size
    return LaunchPlan(job, processes, accelerate_config, at_once or slots, devices, num_cores, size)


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


_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class RayCluster:
    """A cluster that this process has joined, and its hosts."""

    ray: Any
    hosts: tuple[HostResources, ...]

    def start(
        self, command: Sequence[str], *, log: Path, environment: Mapping[str, str], num_processes: int
    ) -> "RayProcess":
        """Start the command on a host with as many free GPUs as it has processes; without GPUs, cores."""
        has_gpus = any(host.num_gpus for host in self.hosts)
        resources = {"num_gpus": num_processes} if has_gpus else {"num_cpus": num_processes}
        actor = self.ray.remote(RunActor).options(**{"num_cpus": 0, **resources})
        return RayProcess(self.ray, actor.remote(list(command), log, dict(environment), Path.cwd()), log)


@contextmanager
def ray_cluster(address: str) -> Iterator[RayCluster]:
    """Join the cluster, or start Ray here for `local`; runs left at the end save and stop. Raises UserError.

    Until the end, what is printed goes to standard error: Ray prints its messages about lost hosts to standard output.
    """
    with redirect_stdout(sys.stderr):
        ray = connect_to_ray(
            None if address == "auto" else address,
            num_cpus=usable_cores(),
            num_gpus=None,
            purpose="finetune sweep --ray",
            prints_output=False,
        )
        try:
            resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            yield RayCluster(ray, tuple(HostResources(int(r.get("CPU", 0)), int(r.get("GPU", 0))) for r in resources))
        finally:
            ray.shutdown()


class RunActor:
    """The process of a run on its host, as an actor of Ray. When it dies the kernel sends the process SIGTERM."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str], folder: Path) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if (log.parents[1] / LOCK_FILE).exists():  # of the sweep, which holds it
            with suppress(OSError):
                os.chdir(folder)
            self._process = start_child([sys.executable, *command[1:]], log=log, environment=environment)

    def poll(self) -> int | str | None:
        """Return the exit code, None while the process runs, or the name of a host that does not share the folder."""
        if self._process is None:
            return socket.gethostname()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_POLL_SECONDS)
        return self._process.returncode

    def send_signal(self, number: int) -> None:
        """Send the process a signal; SIGKILL goes to all its descendants."""
        if self._process is None:
            return
        if number == signal.SIGKILL:
            kill_child(self._process)
        else:
            self._process.send_signal(number)


class RayProcess:
    """A process on the cluster, as `subprocess.Popen` shows one; its exit code is LOST_HOST if its host is lost."""

    def __init__(self, ray: Any, actor: Any, log: Path) -> None:
        self._ray, self._actor, self._log = ray, actor, log
        self._answer = actor.poll.remote()
        self._code: int | None = None
        self._has_begun = False

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs or waits for a host."""
        if self._code is not None or not self._ray.wait([self._answer], timeout=0)[0]:
            return self._code
        try:
            answer = self._ray.get(self._answer)
        except self._ray.exceptions.ActorUnavailableError:
            answer = None
        except self._ray.exceptions.RayError:
            self._code = LOST_HOST
            return self._code
        self._has_begun = True
        if answer is None:
            self._answer = self._actor.poll.remote()
            return None
        if isinstance(answer, str):
            with self._log.open("a") as log:
                log.write(f"error: --folder: host {answer} does not see {self._log.parents[1]}. Name a folder that all "
                          "hosts of the Ray cluster share.\n")  # fmt: skip
            answer = UserError.exit_code
        self._end(answer)
        return self._code

    def send_signal(self, number: int) -> None:
        """Send the process a signal; one that waits for a host ends without a start."""
        if self._code is None and not self._has_begun:
            self._end(-number)
        elif self._code is None:
            self._actor.send_signal.remote(number)

    def kill(self) -> None:
        """Kill the process with all its descendants."""
        self.send_signal(signal.SIGKILL)

    def _end(self, code: int) -> None:
        self._code = code
        self._ray.kill(self._actor)  # which releases its GPUs
