"""The folder in which supervisors meet: a file for each host, which only that host writes, and one for the attempt."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from finetune.launch.supervisor.members import Attempt, Beat

ATTEMPT_FILE = "attempt.json"


class SharedFolder:
    """Reads and writes the files; each appears whole or not at all."""

    def __init__(self, folder: Path, *, lost_after_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._lost_after = lost_after_seconds
        self._clock = clock
        self._seen: dict[str, tuple[int, float | None]] = {}  # counter of each host, and when it was seen to grow
        folder.mkdir(parents=True, exist_ok=True)

    def write_beat(self, beat: Beat) -> None:
        """Write down what this host says of itself; raises OSError."""
        self._write(f"host-{beat.name}.json", asdict(beat))

    def remove_beat(self, name: str) -> None:
        """Forget this host: it has ended."""
        (self._folder / f"host-{name}.json").unlink(missing_ok=True)

    def alive(self) -> dict[str, Beat]:
        """Return the hosts whose counter was seen to grow not long ago, by name: a file that only lies there is old."""
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

    def read_attempt(self) -> Attempt | None:
        """Return the attempt that was begun last; None before the first."""
        try:
            facts = json.loads((self._folder / ATTEMPT_FILE).read_text(encoding="utf-8"))
            return Attempt(**{**facts, "hosts": tuple(facts["hosts"]), "addresses": tuple(facts["addresses"])})
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):
            return None

    def write_attempt(self, attempt: Attempt) -> None:
        """Write the attempt that all hosts are to follow; raises OSError."""
        self._write(ATTEMPT_FILE, asdict(attempt))

    def forget_attempt(self, attempt: Attempt) -> None:
        """Remove the attempt of an earlier launch, whose supervisors have all ended; a newer one stays."""
        if self.read_attempt() == attempt:
            (self._folder / ATTEMPT_FILE).unlink(missing_ok=True)

    def _write(self, name: str, facts: dict[str, Any]) -> None:
        temporary = self._folder / f".{name}.{os.getpid()}"
        temporary.write_text(json.dumps(facts), encoding="utf-8")
        temporary.replace(self._folder / name)
