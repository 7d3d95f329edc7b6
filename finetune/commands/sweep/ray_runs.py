"""The runs of a sweep on the hosts of a Ray cluster: each is a child process of an actor, which holds its GPUs.

A run writes its own files to the folder of the sweep, which all hosts share. When its host is lost the sweep starts it
again, and it resumes from its checkpoint.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.commands.sweep.launching import LOST_HOST, HostResources
from finetune.commands.sweep.study import LOCK_FILE
from finetune.errors import UserError
from finetune.launch.child import kill_child, start_child
from finetune.launch.ray import connect_to_ray
from finetune.runtime.resources import usable_cores

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
