"""How a command ends: an exit code, and one message for what the user can mend."""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, ParamSpec

import typer

from finetune.errors import ConfigError, FinetuneError

P = ParamSpec("P")


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


def message(error: FinetuneError, *, rank: int) -> str | None:
    """Return what this rank prints; None where the first rank says the same: a config is wrong for all alike."""
    if rank == 0:
        return f"error: {error}"
    return None if isinstance(error, ConfigError) else f"[rank {rank}] error: {error}"


def _tell(error: FinetuneError) -> None:
    said = message(error, rank=_rank())
    if said is not None:
        print(said, file=sys.stderr, flush=True)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
