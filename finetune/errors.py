"""The exceptions that a user can meet, as one tree.

FinetuneError
├── UserError              the user can fix it: exit code 2, no traceback
│   ├── ConfigError        the job YAML, an override or the combination of keys; carries every problem at once
│   ├── DataError          a row, a file or a whole dataset cannot be trained on
│   ├── ModelError         the model, tokenizer or adapter cannot be loaded as requested
│   ├── StrategyError      Accelerate did not build what its YAML requests
│   ├── CheckpointError    a checkpoint cannot be written, trusted or resumed
│   ├── MissingPackage     an optional package is needed; names the extra that brings it
│   └── RegistryError      a name is not in the registry's table, or an entry cannot be added to it
├── HubError               the hub rejected an upload: exit code 1
└── TrainingError          the run itself went wrong: exit code 1
    ├── DiskError          what the run writes cannot be written: the disk is full, read-only or gone
    ├── ExportError        an exported folder is not the model that was trained
    ├── NonFiniteError     a loss or gradient is NaN or infinite; names the step and the sample ids
    ├── LostContact        another process of the run is gone; names it where that can be known
    └── Hang               no progress for too long; names the process that the others wait for
"""

import errno
import os
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A disk, a quota or `ulimit -f` has no room for what is written."""

REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG)
BROKEN = (errno.EIO, errno.ELOOP, errno.ESTALE)


class FinetuneError(Exception):
    """The root: everything that this package raises on purpose."""

    exit_code = 1


class UserError(FinetuneError):
    """Something that the user can fix; shown as one message without a traceback."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a config: its place, the problem and what to write instead.

    `key` is dotted (`train.learning_rate`), empty for the whole file; `line` counts from 1 and is None when the key is
    not in the file.
    """

    key: str
    message: str
    line: int | None = None
    source: str | None = None  # the override in which it was written

    def __str__(self) -> str:
        location = f"line {self.line}" if self.line is not None else self.source
        where = ", ".join(part for part in (location, self.key) if part)
        return f"{where}: {self.message}" if where else self.message


class ConfigError(UserError):
    """A config has problems; all of them are listed at once.

    >>> print(ConfigError([Problem("task.nam", "there is no such key.", line=3)], "job.yaml"))
    job.yaml has 1 problem
      line 3, task.nam: there is no such key.
    """

    def __init__(self, problems: Sequence[Problem], source: str, *, num_more: int = 0) -> None:
        self.problems = tuple(problems)
        self.source = source
        self.num_more = num_more  # problems in addition to those, which are only counted
        super().__init__(source)

    def __str__(self) -> str:
        count = len(self.problems) + self.num_more
        head = f"{self.source} has {count} problem{'' if count == 1 else 's'}"
        more = [f"  and {self.num_more} more"] if self.num_more else []
        return "\n".join([head, *(f"  {problem}" for problem in self.problems), *more])


class DataError(UserError):
    """Rows, files or datasets that cannot be trained on."""


class ModelError(UserError):
    """A model, tokenizer or adapter cannot be loaded as requested."""


class StrategyError(UserError):
    """The launched or built strategy differs from the requested one."""


class CheckpointError(UserError):
    """A checkpoint that cannot be written, trusted or resumed."""


class MissingPackage(UserError):
    """An optional package is needed here and is not installed."""


class RegistryError(UserError):
    """A name that is not in a table of the registry, or an entry that cannot be added to one."""


class HubError(FinetuneError):
    """Uploading to the hub failed; the files are still on the disk."""


class TrainingError(FinetuneError):
    """The run itself went wrong."""


class DiskError(TrainingError):
    """Writing to disk failed."""


class ExportError(TrainingError):
    """The export gives other logits or other tokens than the trained model."""


class NonFiniteError(TrainingError):
    """A loss or gradient is NaN or infinite."""


class LostContact(TrainingError):
    """Another process of the run exited unexpectedly."""


class Hang(TrainingError):
    """No progress within the timeout."""


def error_of_type(name: str, message: str, *, exit_code: int) -> FinetuneError:
    """Return the error of another process, which is known by the name of its type, its message and its exit code."""
    kind = globals().get(name)
    if not (isinstance(kind, type) and issubclass(kind, FinetuneError)) or kind is ConfigError:  # made of problems
        kind = UserError if exit_code == UserError.exit_code else TrainingError
    return kind(message)


class NotAFile(OSError):
    """A path leads to a device, a FIFO or a folder where a regular file is expected; the message names its type."""


def disk_text(error: OSError) -> str | None:
    """Return what a disk has refused, in a sentence; None for an error that is of another kind."""
    path = f"{error.filename}: " if error.filename else ""
    if error.errno == errno.EDQUOT:
        return f"{path}the quota is used up ({error.strerror}). Make room."
    if error.errno == errno.EFBIG:
        return f"{path}the file may not grow further ({error.strerror}). See `ulimit -f`."
    if error.errno == errno.ENOSPC:
        return f"{path}the disk is full ({error.strerror}). Make room."
    if error.errno in (*REFUSED, *BROKEN) and error.filename:
        return f"{path}cannot be written or read: {error.strerror}."
    return None


_RUST = re.compile(r"Os \{ code: (\d+)|\(os error (\d+)\)")
"""How libraries in Rust (safetensors, tokenizers) write the number of an operating system's error."""

_TORCH = re.compile(r"PytorchStreamWriter failed writing|unexpected pos \d+ vs")
"""What `torch.save` makes of a file that cannot grow, without the number."""


def system_error(error: BaseException) -> OSError | None:
    """Return the system's error that this is, or that a library has made another one of."""
    if isinstance(error, OSError):
        return error
    match = _RUST.search(str(error))
    if match is not None:
        number = int(match[1] or match[2])
        return OSError(number, os.strerror(number))
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if _TORCH.search(str(error)) else None


@contextmanager
def refused_exits() -> Iterator[None]:
    """Raise TrainingError for a SystemExit: code of a plugin, a model or a library has ended its caller's process."""
    try:
        yield
    except SystemExit as ended:
        frame = traceback.extract_tb(ended.__traceback__)[-1]
        raise TrainingError(
            f"{frame.filename}, line {frame.lineno}, in {frame.name}: this code ended the process with exit code "
            f"{ended.code!r} before the command was done. Remove the exit; a callback ends a run with `Request.STOP`."
        ) from ended
