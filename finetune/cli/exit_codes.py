"""How a command ends: its exit code, and one message for an error that the user can fix."""

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec

import typer

from finetune.errors import FinetuneError, UserError, disk_text
from finetune.runtime.text.redact import redacted_command, register_command
from finetune.runtime.text.terminal import guarded_output, print_traceback, printable

P = ParamSpec("P")

_FIRST_RANK_SECONDS = 10.0


def handle_errors(command: Callable[P, Any]) -> Callable[P, None]:
    """Return the command with the exit codes 0 or its own, 2 for UserError and disk errors, 1 for TrainingError.

    An error is one message. Ctrl-C is one line and exit code 130. Anything else is a bug and keeps its traceback.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with guarded_output():
            try:
                code = command(*args, **kwargs)
            except FinetuneError as error:
                _print_error(error)
                code = error.exit_code
            except OSError as error:
                text = disk_text(error)
                if text is None:
                    raise
                _print_error(UserError(text))
                code = UserError.exit_code
            except EOFError as error:
                raise RuntimeError("a file ended too early") from error  # typer would say "Aborted!" and no more
            except KeyboardInterrupt:
                if _rank() == 0:
                    print("interrupted", file=sys.stderr)
                code = 130
        raise typer.Exit(code or 0)

    return run


@contextmanager
def guarded_command_line() -> Iterator[None]:
    """Keep everything that is printed readable, also the traceback of a bug, which ends with exit code 1.

    `sys.argv`, which trackers record, has its secrets redacted; they are left out of all that is written and printed.
    """
    with guarded_output():
        register_command(sys.argv[1:])
        sys.argv[1:] = redacted_command(sys.argv[1:])
        try:
            yield
        except SystemExit as ended:
            raise SystemExit(
                ended.code if isinstance(ended.code, int | None) else _print_exit_message(str(ended.code))
            ) from None
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic in Rust, for example, is no Exception
            print_traceback(error)
            raise SystemExit(1) from None


def format_error(error: FinetuneError, *, rank: int) -> str:
    """Return what this rank prints."""
    return printable(f"error: {error}" if rank == 0 else f"[rank {rank}] error: {error}")


def _print_error(error: FinetuneError) -> None:
    if isinstance(error, UserError) and _rank() > 0:
        # Every rank meets most of them, and the launcher ends all ranks with the first that exits: rank 0 prints it.
        time.sleep(_FIRST_RANK_SECONDS)
    print(format_error(error, rank=_rank()), file=sys.stderr, flush=True)


def _print_exit_message(text: str) -> int:
    """Print the message of a SystemExit, and return the exit code that Python gives it."""
    print(text, file=sys.stderr, flush=True)
    return 1


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
