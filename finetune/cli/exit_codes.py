"""How a command begins and ends: its ranks, its exit code, and one message for an error that the user can fix."""

import errno
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import typer
from typer.core import TyperGroup

from finetune.errors import (
    FinetuneError,
    NotAFile,
    UserError,
    disk_text,
    refused_exits,
    system_error,
)
from finetune.launch.ranks import OWN_RUN_ID, adopt_ranks
from finetune.runtime.text.redact import redacted_command, register_command
from finetune.runtime.text.standard_streams import (
    CLOSED_PIPE,
    INTERRUPTED,
    discard_output,
    flush_streams,
    is_pipe_closed,
    raised_interrupts,
)
from finetune.runtime.text.terminal import guarded_output, print_traceback, printable

P = ParamSpec("P")
R = TypeVar("R")

_FIRST_RANK_SECONDS = 10.0

_LAUNCHED = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")
"""torchrun and accelerate launch set one of them, and print a traceback of their own when a process fails."""


class CommandGroup(TyperGroup):
    """The commands with the exit codes 0 or their own, 2 for UserError and disk errors, 1 for TrainingError.

    An error is one message. Ctrl-C is one line and exit code 130. Anything else is a bug and keeps its traceback.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command; raises typer.Exit."""
        with guarded_output():
            try:
                with raised_interrupts(), refused_exits():  # typer, which calls this, prints no message at Ctrl-C
                    code = super().invoke(ctx)
            except FinetuneError as error:
                _print_error(error)
                code = error.exit_code
            except OSError as error:
                code = _end_by_surroundings(error)
            except EOFError as error:
                raise RuntimeError("a file ended too early") from error  # typer would only print "Aborted!"
            except KeyboardInterrupt:
                code = _end_by_interrupt()
        raise typer.Exit(code or 0)


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


@contextmanager
def guarded_command_line() -> Iterator[None]:
    """Turn any exception that ends the program into an exit code and at most one printable message."""
    code: int | None = 0
    with guarded_output():
        try:
            register_command(sys.argv[1:])
            sys.argv[1:] = redacted_command(sys.argv[1:])
            yield
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int | None) else 1  # as Python does with a message
            if code is not ended.code:
                print(ended.code, file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            code = _end_by_interrupt()
        except OSError as error:
            try:
                code = _end_by_surroundings(error)
            except OSError:
                print_traceback(error)
                code = 1
        except BaseException as error:
            if type(error).__name__ == "PanicException":  # of Rust: tokenizers or safetensors could not read a file
                text = (
                    f"a file of the model or tokenizer is damaged: {str(error)[:200]}. Copy it again from its source."
                )
                _print_error(UserError(text))
                code = UserError.exit_code
            elif (refused := system_error(error)) is not None and disk_text(refused) is not None:
                code = _end_by_surroundings(refused)
            else:
                print_traceback(error)
                code = 1
    unwritten = flush_streams()
    if unwritten is not None and unwritten.errno == errno.EPIPE:
        code = CLOSED_PIPE
    elif unwritten is not None and not code:
        unwritten.filename = unwritten.filename or "standard output"
        code = _end_by_surroundings(unwritten)
    raise SystemExit(code)


def _end_by_surroundings(error: OSError) -> int:
    """Print the error of the operating system and return the exit code; re-raises an error that is not known here."""
    if error.errno == errno.EPIPE and is_pipe_closed():
        for descriptor in (1, 2):
            discard_output(descriptor)
        return CLOSED_PIPE
    text = disk_text(error)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        text = f"too many files are open ({error.strerror}). Raise the limit: `ulimit -n 4096`."
    elif error.errno == errno.ENOENT and not _has_current_folder():
        text = "the current folder no longer exists. Change to another folder first."
    elif error.filename and (isinstance(error, NotAFile) or error.errno in (errno.ENOENT, errno.ENXIO, errno.ENODEV)):
        text = f"{error.filename}: {error.strerror}."
    if text is None:
        raise error
    _print_error(UserError(text))
    return UserError.exit_code


def _end_by_interrupt() -> int:
    if _rank() == 0:
        with suppress(OSError, ValueError):
            print("interrupted", file=sys.stderr)
    return INTERRUPTED


def _has_current_folder() -> bool:
    try:
        return Path.cwd().exists()
    except OSError:
        return False


def _print_error(error: FinetuneError) -> None:
    if isinstance(error, UserError) and _rank() > 0:
        # Every rank meets most of them, and the launcher ends all ranks with the first that exits: rank 0 prints it.
        time.sleep(_FIRST_RANK_SECONDS)
    with suppress(OSError, ValueError):  # nobody reads it
        prefix = f"[rank {_rank()}] " if _rank() else ""
        print(printable(f"{prefix}error: {error}"), file=sys.stderr, flush=True)
        is_ours = os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(OWN_RUN_ID)
        is_launched = any(name in os.environ for name in _LAUNCHED) and not is_ours
        if isinstance(error, UserError) and is_launched:
            print("Ignore the launcher's traceback below: it only reports this exit.", file=sys.stderr, flush=True)


def _rank() -> int:
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isascii() and rank.isdigit() else 0
