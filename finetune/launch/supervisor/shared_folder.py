"""The folder that supervisors share: a file for each host, which only that host writes, and one for each attempt."""

import json
import os
import platform
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.launch.supervisor.members import Attempt, Beat

ATTEMPT_FILE = "attempt.json"
"""A copy of the newest `attempt-NUMBER.json`: hosts, reason, step, and at last the exit code."""

_NUM_CHECKS = 3  # of a file with this host's name, to detect another writer


class SharedFolder:
    """Reads and writes the files; each appears whole or not at all."""

    def __init__(self, folder: Path, *, lost_after_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._lost_after = lost_after_seconds
        self._clock = clock
        self._seen: dict[str, tuple[int, float | None]] = {}  # counter of each host, and when it last grew
        folder.mkdir(parents=True, exist_ok=True)

    def write_beat(self, beat: Beat) -> None:
        """Write the heartbeat of this host; raises OSError."""
        self._write(f"host-{beat.name}.json", asdict(beat))

    def remove_beat(self, beat: Beat) -> None:
        """Remove the heartbeat of an ended supervisor, but not that of one that has replaced it."""
        if (written := self.last_write(beat.name)) is not None and written[0] == beat.session:
            (self._folder / f"host-{beat.name}.json").unlink(missing_ok=True)

    def alive(self) -> dict[str, Beat]:
        """Return the heartbeats whose counter grew recently, by host; others are stale."""
        now, beats = self._clock(), {}
        for path in sorted(self._folder.glob("host-*.json")):
            try:
                facts = json.loads(path.read_text(encoding="utf-8"))
                beat = Beat(**{**facts, "reaches": tuple(facts["reaches"])})
            except (OSError, ValueError, TypeError, KeyError):  # being removed, or of another program
                continue
            count, grew_at = self._seen.get(beat.name, (beat.count, None))
            grew_at = now if beat.count != count else grew_at
            self._seen[beat.name] = beat.count, grew_at
            if grew_at is not None and now - grew_at < self._lost_after:
                beats[beat.name] = beat
        return beats

    def skip(self, seconds: float) -> None:
        """Extend the deadline of each host by a time in which this host could not check."""
        self._seen = {
            name: (count, None if grew_at is None else grew_at + seconds)
            for name, (count, grew_at) in self._seen.items()
        }

    def last_write(self, name: str) -> tuple[str, int] | None:
        """Return the session that last wrote this host's file, and its counter; None without a file."""
        try:
            facts = json.loads((self._folder / f"host-{name}.json").read_text(encoding="utf-8"))
            return str(facts["session"]), int(facts["count"])
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def last_number(self) -> int:
        """Return the number of the newest attempt, earlier launches included; 0 before the first."""
        numbers = (path.stem.removeprefix("attempt-") for path in self._folder.glob("attempt-*.json"))
        return max((int(number) for number in numbers if number.isdecimal()), default=0)

    def read_attempt(self) -> Attempt | None:
        """Return the newest attempt; None before the first, and where its file is damaged."""
        try:
            facts = json.loads(self._attempt_path(self.last_number()).read_text(encoding="utf-8"))
            lists = {name: tuple(facts[name]) for name in ("hosts", "addresses", "sessions")}
            return Attempt(**{**facts, **lists})
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):
            return None

    def write_attempt(self, attempt: Attempt) -> bool:
        """Write the attempt that all hosts follow; return False where another host began one with this number.

        So two hosts that both believe that they lead, as after a suspension, cannot both begin an attempt. Raises
        OSError.
        """
        path = self._attempt_path(attempt.number)
        temporary = self._write_temporary(path.name, asdict(attempt))
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            if path.exists():
                return False
            shutil.copyfile(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        self.publish(attempt)
        return True

    def publish(self, attempt: Attempt) -> None:
        """Write the attempt to `attempt.json`, for programs that watch the run."""
        text = json.dumps(asdict(attempt))
        with suppress(OSError):
            if (self._folder / ATTEMPT_FILE).read_text(encoding="utf-8") == text:
                return
        self._write(ATTEMPT_FILE, asdict(attempt))

    def _attempt_path(self, number: int) -> Path:
        return self._folder / f"attempt-{number:06d}.json"

    def _write(self, name: str, facts: dict[str, Any]) -> None:
        self._write_temporary(name, facts).replace(self._folder / name)

    def _write_temporary(self, name: str, facts: dict[str, Any]) -> Path:
        temporary = self._folder / f".{name}.{platform.node()}.{os.getpid()}"
        temporary.write_text(json.dumps(facts), encoding="utf-8")
        return temporary


class NameCheck:
    """Checks that the name of this host is unique: two hosts with one name would overwrite each other's file."""

    def __init__(self, shared: SharedFolder, beat: Beat) -> None:
        self._shared, self._beat = shared, beat
        self._stale_write = shared.last_write(beat.name)
        self._checks_left = _NUM_CHECKS if self._stale_write is not None else 0

    def is_free(self) -> bool:
        """Return whether the host's file may be written, which takes a few checks.

        Raises UserError where another supervisor writes it.
        """
        written = self._shared.last_write(self._beat.name)
        if written is not None and written != self._stale_write and written[0] != self._beat.session:
            raise UserError(
                f"--name {self._beat.name}: another supervisor has this name. Give each host a unique name."
            )
        self._checks_left -= 1
        return self._checks_left < 0
