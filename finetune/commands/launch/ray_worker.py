"""A worker of Ray Train: it runs one rank of the job as a child process, and reports the run's progress to Ray.

The rank is a process of its own, as under every other launcher: signals, exit codes and locks are the same, and Ray's
process holds no GPU memory and no process group, for whose peers it would wait when a host is lost. When Ray kills the
worker, the kernel sends the rank SIGTERM, after which it saves and ends.
"""

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from finetune.commands.launch.attempt_end import INTERRUPTED, USER_MISTAKE, AttemptEnd, read_end
from finetune.commands.rehearse.accelerate_file import read_accelerate_file, with_copies_for
from finetune.errors import TrainingError
from finetune.launch.child import kill_child, start_child
from finetune.launch.ranks import TORCHRUN_DEFAULTS, Ranks, free_port
from finetune.runtime.files import atomic
from finetune.runtime.optional import require
from finetune.runtime.run_folder import is_locked, is_replaced, mark_attempt, mark_of
from finetune.runtime.supervision.status import read_status
from finetune.runtime.text.terminal import format_json

RAY_FOLDER = "ray"
"""Folder of the marks of attempts and of Ray's own files, in the run folder."""

PURPOSE = "finetune launch ray"

_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")

_OVER = (0, USER_MISTAKE, INTERRUPTED)
"""Exit codes after which the run is over; after any other Ray starts the ranks again."""

_STOPPED = 143
"""Exit code after SIGTERM: the command replaces it by that of its own signal."""

_SHUT_DOWN = (1, 3)
"""Reasons of Ray's NodeDeathInfo (common.proto): the raylet ended at a request, or its host was preempted."""

_POLL_SECONDS, _REPORT_SECONDS, _FINAL_REPORT_SECONDS = 0.5, 5.0, 15.0
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class RankJob:
    """The ranks that each worker starts."""

    arguments: tuple[str, ...]  # arguments of Python: -m finetune train --config JOB.yaml ...
    accelerate_file: Path  # it and the job may be relative to the working folder
    working_folder: Path  # of the ranks, on each host
    run_folder: Path
    worlds: tuple[int, ...]  # numbers of ranks that can share the batch
    stop_seconds: float  # to save after a stop request


@dataclass(frozen=True)
class Attempt:
    """One start of the ranks, as the worker of rank 0 has chosen it for all workers."""

    number: int
    world: int  # the other workers are spares
    address: str
    port: int
    since: float  # by the clock of rank 0's host


class RunControl:
    """State that the command and all workers share, as an actor of Ray: stop request, last attempt, end of the run."""

    def __init__(self) -> None:
        self._is_stopping, self._exit_code = False, None
        self._attempt: tuple[int, frozenset[str]] = (0, frozenset())

    def begin(self, number: int, hosts: frozenset[str]) -> None:
        """Record the attempt that begins, and the hosts of the cluster then."""
        self._attempt = number, hosts

    def last_attempt(self) -> tuple[int, frozenset[str]]:
        """Return the newest attempt and its hosts; 0 without one."""
        return self._attempt

    def request_stop(self) -> None:
        """Ask all workers to have their ranks save and end."""
        self._is_stopping = True

    def finish(self, exit_code: Any) -> None:
        """Record that the run is over."""
        self._exit_code = exit_code

    def read(self) -> tuple[bool, Any]:
        """Return whether a stop was requested, and the exit code of a run that is over."""
        return self._is_stopping, self._exit_code


class RankFailed(TrainingError):
    """A rank ended, and the run is not over: Ray starts all ranks again."""


def largest_world(num_workers: int, worlds: Sequence[int]) -> int:
    """Return the largest number of ranks that can share the batch and for which there are workers.

    >>> largest_world(3, [1, 2, 4])
    2
    """
    return max(world for world in worlds if world <= num_workers)


def place_rank(attempt: Attempt, *, rank: int, local_rank: int, local_workers: int) -> Ranks:
    """Return the rank of a worker. Ray numbers the workers of a host in a row, so spares are the last ones of all."""
    local_world = min(local_workers, attempt.world - (rank - local_rank))
    return Ranks(rank, attempt.world, local_rank, local_world, attempt.address, attempt.port, "Ray")


def run_worker(settings: Mapping[str, Any]) -> int:
    """Run this worker's rank to its end, and return the exit code of the run.

    Raises RankFailed where Ray has to start the ranks again. Ray calls it on every worker.
    """
    job: RankJob = settings["job"]
    control = _Control(settings["control"])
    context = require("ray.train", extra="ray", purpose=PURPOSE).get_context()
    rank, num_workers = context.get_world_rank(), context.get_world_size()
    address = require("ray.util", extra="ray", purpose=PURPOSE).get_node_ip_address()
    folder, copy = job.working_folder, Path.cwd()
    if copy.name.startswith("_ray_pkg_") and copy.name in folder.parts:  # Ray has sent it: each host has a copy
        folder = copy.joinpath(*folder.parts[folder.parts.index(copy.name) + 1 :])
    os.chdir(folder)
    logging.disable(logging.INFO)  # Ray writes a line for each report
    begun = _begin_attempt(job, control, address=address, num_workers=num_workers) if rank == 0 else None
    attempt: Attempt | int = _broadcast(begun)
    if isinstance(attempt, int):  # the run is over
        return attempt
    local_rank, local_workers = context.get_local_rank(), context.get_local_world_size()
    ranks = place_rank(attempt, rank=rank, local_rank=local_rank, local_workers=local_workers)
    ended = threading.Event()
    report = require("ray.train", extra="ray", purpose=PURPOSE).report

    def report_progress() -> None:
        """Report step, loss and the end of the run to Ray. All workers report together, as Ray wants."""
        is_last = False
        while not is_last:
            is_last = rank == 0 and ended.wait(timeout=_REPORT_SECONDS)
            metrics, is_last = _broadcast((read_metrics(job.run_folder), is_last) if rank == 0 else None)
            report(metrics)

    reporter = threading.Thread(target=report_progress, daemon=True)
    reporter.start()
    is_spare = rank >= attempt.world
    code = control.wait_for_end() if is_spare else _run_rank(job, ranks, attempt, control, address=address)
    ended.set()
    reporter.join(timeout=_FINAL_REPORT_SECONDS)
    return code


def _begin_attempt(job: RankJob, control: "_Control", *, address: str, num_workers: int) -> Attempt | int:
    """Return the next attempt, after the ranks of the last one have ended; the exit code if the run is over."""
    if (code := control.read()[1]) is not None:
        return int(code)
    marks = job.run_folder / RAY_FOLDER
    (last, last_hosts), hosts = control.last_attempt(), control.hosts()
    away = f"waits: the run folder is away, {job.run_folder} has no attempt {last}"  # an empty mount point, perhaps
    if not control.wait_while(lambda: last > 0 and not mark_of(marks, last).exists(), away):
        return _STOPPED
    can_save = last_hosts <= hosts  # without a host of theirs its ranks would wait for it until they are replaced
    until = time.monotonic() + (job.stop_seconds if can_save else 0)
    while is_locked(job.run_folder) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    marks.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(path.name[-6:]) for path in marks.glob("begun-*")), default=0)
    mark_attempt(marks, number)  # ranks that Ray could not kill write no more, and end
    control.begin(number, hosts)
    locked = f"attempt {number} waits: a process still writes to {job.run_folder}"  # on a suspended host, perhaps
    if not control.wait_while(lambda: is_locked(job.run_folder), locked):
        return _STOPPED
    world = largest_world(num_workers, job.worlds)
    file = read_accelerate_file(job.accelerate_file)
    if file.num_copies > 1:
        resized = with_copies_for(file, world).values
        atomic.write_bytes(_file_of_copies(marks, number), format_json(resized).encode())
    spares = "" if world == num_workers else f": {num_workers} cannot share the batch, {num_workers - world} wait"
    print(f"finetune: attempt {number}, world size {world}{spares}", flush=True)
    return Attempt(number, world, address, free_port(), time.time())


def _run_rank(job: RankJob, ranks: Ranks, attempt: Attempt, control: "_Control", *, address: str) -> int:
    """Run the rank, and return the exit code of the run; raises RankFailed if it is not over."""
    marks = job.run_folder / RAY_FOLDER
    if not mark_of(marks, attempt.number).exists():
        print(f"error: run.folder: {socket.gethostname()} does not see the files that rank 0 wrote to {marks}. Name a "
              "folder that all hosts share.", flush=True)  # fmt: skip
        control.finish(USER_MISTAKE)
        return USER_MISTAKE
    # By default gloo uses the address of the hostname, often 127.0.0.1, and NCCL the first interface: take the one by
    # which Ray reaches the other hosts.
    interfaces = psutil.net_if_addrs().items()
    interface = next((name for name, own in interfaces if any(each.address == address for each in own)), None)
    defaults = TORCHRUN_DEFAULTS | (dict.fromkeys(_INTERFACE_VARIABLES, interface) if interface is not None else {})
    environment = {
        **{name: os.environ.get(name, value) for name, value in defaults.items()},
        **ranks.variables(),
        **mark_attempt(marks, attempt.number),
    }
    file = _file_of_copies(marks, attempt.number)
    file = file if file.exists() else job.accelerate_file
    end_replaced_ranks(marks, attempt.number)
    process = start_child([sys.executable, *job.arguments, "--accelerate", str(file)], environment=environment)
    try:
        code, was_stopped = _wait(process, control, stop_seconds=job.stop_seconds)
    finally:
        kill_child(process)
    end = read_end(job.run_folder, since=attempt.since) or AttemptEnd(None)
    code = code if end.exit_code is None else end.exit_code
    is_away = not mark_of(marks, attempt.number).exists()  # the run folder; a rank that cannot write ends with 2
    if (code in _OVER and not is_away) or was_stopped:
        control.finish(code)
        return code
    reason = end.reason or ("it was killed" if code > 128 else "its last lines say why")
    failure = RankFailed(f"rank {ranks.rank} ended with exit code {code}: {reason}")
    print(f"finetune: {failure}", flush=True)
    raise failure


def end_replaced_ranks(marks: Path, number: int, *, patience_seconds: float = 10.0) -> None:
    """Wait for the ranks of earlier attempts on this host, and kill any that is stopped or stuck in its device."""
    replaced: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            is_here = Path(f"/proc/{process.pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink()
            is_rank = process.cmdline()[1:4] == ["-m", "finetune", "train"]
            if is_here and is_rank and is_replaced(process.environ(), marks, number):
                replaced.append(process)
    for process in psutil.wait_procs(replaced, timeout=patience_seconds)[1]:
        with suppress(psutil.Error):
            process.kill()


def _file_of_copies(marks: Path, number: int) -> Path:
    """Return the path of the accelerate file of an attempt of HSDP, whose number of copies is its own."""
    return marks / f"accelerate-{number:06d}.yaml"


def _wait(process: "subprocess.Popen[bytes]", control: "_Control", *, stop_seconds: float) -> tuple[int, bool]:
    """Return the exit code of the rank, in the shell's numbers, and whether a stop was requested."""
    kill_at: float | None = None
    while process.poll() is None:
        if kill_at is None and control.read()[0]:
            process.terminate()
            kill_at = time.monotonic() + stop_seconds
        if kill_at is not None and time.monotonic() > kill_at:
            kill_child(process)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_POLL_SECONDS)
    code = process.returncode
    return (code if code >= 0 else 128 - code), kill_at is not None


class _Control:
    """Calls of RunControl. A command that has ended counts as a stop request, a call that takes long as none."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._ray = require("ray", extra="ray", purpose=PURPOSE)

    def read(self) -> tuple[bool, Any]:
        try:
            state: tuple[bool, Any] = self._ray.get(self._actor.read.remote(), timeout=_REPORT_SECONDS)
        except self._ray.exceptions.GetTimeoutError:
            return False, None
        except self._ray.exceptions.RayError:
            return True, None
        return state

    def finish(self, code: int) -> None:
        with suppress(self._ray.exceptions.RayError):
            self._ray.get(self._actor.finish.remote(code), timeout=_REPORT_SECONDS)

    def last_attempt(self) -> tuple[int, frozenset[str]]:
        state: tuple[int, frozenset[str]] = self._ray.get(self._actor.last_attempt.remote())
        return state

    def begin(self, number: int, hosts: frozenset[str]) -> None:
        self._ray.get(self._actor.begin.remote(number, hosts))

    def hosts(self) -> frozenset[str]:
        """Return the hosts that Ray believes to be alive, and hosts that were shut down: their ranks may be saving."""
        return frozenset(
            node["NodeID"] for node in self._ray.nodes() if node["Alive"] or node.get("DeathReason") in _SHUT_DOWN
        )

    def wait_while(self, is_so: Callable[[], bool], message: str) -> bool:
        """Wait while it is so, and log that; return False after a stop request, which ends the run."""
        if is_so():
            print(f"finetune: {message}", flush=True)
        while is_so():
            if self.read()[0]:
                self.finish(_STOPPED)
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def wait_for_end(self) -> int:
        while (code := self.read()[1]) is None:
            time.sleep(_POLL_SECONDS)
        return int(code)


def read_metrics(run_folder: Path) -> dict[str, Any]:
    """Return state, step, reason of the end and the newest loss of the run, as far as its files have them."""
    status = read_status(run_folder)
    error = status.get("error")
    reason = error.get("message") if isinstance(error, dict) else status.get("reason")
    metrics = {"state": status.get("state"), "step": status.get("step"), "reason": reason}
    with suppress(OSError, ValueError), (run_folder / "events.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = [line for line in file.read().splitlines() if b'"StepTaken"' in line and line.endswith(b"}")]
        metrics["loss"] = json.loads(lines[-1])["loss"] if lines else None
    return {name: value for name, value in metrics.items() if value is not None}


def _broadcast(value: Any) -> Any:
    return require("ray.train.collective", extra="ray", purpose=PURPOSE).broadcast_from_rank_zero(value)
