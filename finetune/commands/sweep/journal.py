"""`sweep.journal`, the state of a sweep: Optuna's journal, one operation per line of JSON.

Optuna's own `JournalFileBackend` and `optuna-dashboard` can read it. Ours also tolerates a kill or a full disk: an
incomplete line is dropped, and lines that cannot be written are kept in memory and written later.
"""

import json
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from optuna.storages.journal import BaseJournalBackend

from finetune.errors import UserError
from finetune.runtime.files.read import parse_json, read_regular

LOCK_FILE = ".sweep.lock"


class SweepJournal(BaseJournalBackend):
    """The operations of a journal; nothing is written before `save`, so a dry run leaves no files."""

    def __init__(self, path: Path) -> None:
        """Read the file where it exists; raises OSError or ValueError."""
        self._path = path
        content = read_regular(path) if path.exists() else b""
        self._size = content.rfind(b"\n") + 1  # bytes of whole lines
        self._operations: list[dict[str, Any]] = [parse_json(line) for line in content[: self._size].splitlines()]
        self._unwritten = b""
        self._is_saved, self._has_warned = False, False

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """Yield the operations from this number on."""
        yield from self._operations[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Add operations; if they cannot be written, print one warning and try again with the next ones."""
        lines = [json.dumps(operation, separators=(",", ":")) for operation in logs]
        self._operations += map(json.loads, lines)
        self._unwritten += "".join(f"{line}\n" for line in lines).encode()
        if self._is_saved:
            try:
                self._write()
            except OSError as error:
                if not self._has_warned:
                    self._has_warned = True
                    print(f"warning: {self._path} cannot be written: {error}", file=sys.stderr, flush=True)

    def save(self) -> None:
        """Write all operations, and from now on each one as it is added; raises OSError."""
        self._write()
        self._is_saved = True

    def _write(self) -> None:
        number = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with os.fdopen(number, "wb") as file:
            file.truncate(self._size)  # an incomplete line
            file.seek(self._size)
            file.write(self._unwritten)
            file.flush()
            os.fsync(file.fileno())
        self._size += len(self._unwritten)
        self._unwritten = b""


@contextmanager
def lock_sweep(folder: Path) -> Iterator[None]:
    """Hold the sweep's folder, which is created; raises UserError if another sweep holds it."""
    lock = FileLock(folder / LOCK_FILE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(
            f"--folder: another `finetune sweep` is running in {folder}. Wait for it, or choose another folder."
        ) from None
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"--folder: {folder} cannot be written: {reason}. Choose another folder.") from error
    try:
        yield
    finally:
        lock.release()
