"""How a command ends: an exit code, and one message for what the user can mend."""

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any, ParamSpec

import typer

from finetune.errors import FinetuneError

P = ParamSpec("P")

_FIRST_RANK_SECONDS = 10.0


def reported(command: Callable[P, Any]) -> Callable[P, None]:
    """Return the command with the house's endings: 0, its own code, 1, 2 or 130.

    UserError: one message, exit code 2. TrainingError: one message, exit code 1. Ctrl-C: one line, exit code 130.
    Anything else is a fault of ours and keeps its traceback.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = command(*args, **kwargs)
        except FinetuneError as error:
            _tell(error)
            code = error.exit_code
        except KeyboardInterrupt:
            if _rank() == 0:
                print("interrupted", file=sys.stderr)
            code = 130
        raise typer.Exit(code or 0)

    return run


def message(error: FinetuneError, *, rank: int) -> str:
    """Return what this rank prints."""
    return f"error: {error}" if rank == 0 else f"[rank {rank}] error: {error}"


def _tell(error: FinetuneError) -> None:
    if error.is_on_all_ranks and _rank() > 0:
        # It is wrong for all alike, and the launcher ends everybody with the first that goes: rank 0 is to speak.
        time.sleep(_FIRST_RANK_SECONDS)
    print(message(error, rank=_rank()), file=sys.stderr, flush=True)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
