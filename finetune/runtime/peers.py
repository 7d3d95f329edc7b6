"""The processes of this run, and whether they still live."""

import os
import platform
from collections.abc import Sequence

import psutil

from finetune.runtime import ranks
from finetune.runtime.peer import Peer


def meet() -> list[Peer]:
    """Return all processes of the run. Collective."""
    return ranks.gather_objects(Peer(ranks.rank(), platform.node(), os.getpid()))


def gone(peers: Sequence[Peer]) -> list[Peer]:
    """Return those that ran on this host and live no more; of other hosts nothing is known."""
    return [peer for peer in peers if peer.host == platform.node() and not _lives(peer.pid)]


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
