"""The launch of one attempt on this host: `accelerate launch`, which starts this host's ranks."""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from finetune.launch.child import kill_child, start_child
from finetune.launch.supervisor.members import Attempt


@dataclass(frozen=True)
class Job:
    """The job to launch on every host."""

    words: tuple[str, ...]  # arguments after `accelerate launch ...`: -m finetune --config JOB.yaml ...
    accelerate_file: Path
    ranks_per_host: int
    is_hybrid: bool = False  # HSDP: a copy of the model per host
    sequence_size: int = 1  # ranks that share the tokens of every row
    is_deepspeed: bool = False  # which Accelerate would launch through pdsh on all hosts at once
    stop_seconds: float = 180.0  # to save after a stop request


def launch_command(job: Job, attempt: Attempt, *, rank: int) -> list[str]:
    """Return the command of the host with this number: three words of Python, then those of `accelerate launch`."""
    count = len(attempt.hosts)
    hybrid = (
        ("--parallelism_config_dp_replicate_size", str(count)),
        ("--parallelism_config_dp_shard_size", str(job.ranks_per_host // job.sequence_size)),
    )
    options = (
        ("--config_file", str(job.accelerate_file)),
        ("--num_machines", str(count)),
        ("--num_processes", str(count * job.ranks_per_host)),
        ("--machine_rank", str(rank)),
        ("--main_process_ip", attempt.addresses[0]),
        ("--main_process_port", str(attempt.port)),
        *(hybrid if job.is_hybrid else ()),
        *((("--deepspeed_multinode_launcher", "standard"),) if job.is_deepspeed else ()),
    )
    launcher = [sys.executable, "-m", "finetune.launch.supervisor.launcher"]
    return [*launcher, *(word for option in options for word in option), *job.words]


class Agent:
    """The launcher of this host, as a process of its own; it ends with this process."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = start_child(command, environment=environment)

    def exit_code(self) -> int | None:
        """Return how it ended; None while it runs."""
        return self._process.poll()

    def request_stop(self) -> None:
        """Request that the ranks save and end."""
        with suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """End it and all its ranks now; each rank is the leader of a group of its own."""
        kill_child(self._process)


def network_environment(interface: str, *, stop_seconds: float) -> dict[str, str]:
    """Return the variables with which ranks reach one another, except those that are already set.

    By default gloo uses the address of the hostname, which often is 127.0.0.1, and NCCL the first interface, which may
    belong to a container.
    """
    variables = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), interface)
    variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(max(1, int(stop_seconds) - 5))
    return {name: value for name, value in variables.items() if name not in os.environ}
