"""Commands that may be started as several processes get their ranks from their launcher."""

import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from finetune.launch.ranks import adopt_ranks

P = ParamSpec("P")
R = TypeVar("R")


def with_ranks(command: Callable[P, R]) -> Callable[P, R]:
    """Return the command, which first takes the ranks of `srun` or `mpirun` for its own; rank 0 prints them.

    Not for commands that start processes themselves: `srun` may start one `finetune launch` on each host.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        ranks = adopt_ranks(os.environ)
        if ranks is not None and ranks.rank == 0:
            print(ranks, file=sys.stderr, flush=True)
        return command(*args, **kwargs)

    return run
