"""The launcher that started this process: when it dies, nobody would tell the processes that it has left behind."""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

LAUNCHERS = frozenset({"accelerate", "accelerate-launch", "torchrun", "deepspeed"})
LAUNCHER_MODULES = ("accelerate.commands", "torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher")
ELASTIC = "TORCHELASTIC_RUN_ID"
"""Set by torchelastic, through which `accelerate launch` and `torchrun` start several processes."""

_PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with_launcher() -> None:
    """Have the kernel send this process SIGTERM when its launcher dies, so that it saves and ends.

    Nothing happens without a launcher: a run started from a shell may outlive it. Nor elsewhere than on Linux.
    """
    parent = os.getppid()
    if sys.platform != "linux" or not (ELASTIC in os.environ or is_launcher(_command(parent))):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    is_gone = parent == 1 and not is_launcher(_command(parent))  # died before we asked; in a container it may be 1
    if is_gone or os.getppid() != parent:  # died meanwhile: the kernel tells nothing that happened before the call
        os.kill(os.getpid(), signal.SIGTERM)


def is_launcher(command: Sequence[str]) -> bool:
    """Tell whether this command line is that of a launcher.

    >>> is_launcher(["/usr/bin/python", "/usr/bin/accelerate", "launch"]), is_launcher(["bash"])
    (True, False)
    """
    return any(Path(word).name in LAUNCHERS or word.startswith(LAUNCHER_MODULES) for word in command[:4])


def launch_name(variables: Mapping[str, str], *, host: str, pid: int, parent: int) -> str:
    """Return a name that all processes of one launch share and no other launch has at the same time."""
    address = variables.get("MASTER_ADDR")
    if address is None or int(variables.get("WORLD_SIZE", "1")) == 1:
        return f"{host}:{pid}"
    place = f"{host}:{parent}" if address in ("127.0.0.1", "localhost", "::1") else address
    return f"{place}:{variables.get('MASTER_PORT')}:{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _command(pid: int) -> list[str]:
    try:
        return list(psutil.Process(pid).cmdline())
    except psutil.Error:
        return []
