"""While DeepSpeed compiles, somebody tells what is waited for, and removes the locks of builds that are dead."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from finetune.runtime.build_locks import (
    ABANDONED,
    BUILDING,
    build_locks,
    extensions_folder,
    frame_of,
    judge,
    remove_abandoned,
    waited_for,
)

_LOOK_SECONDS = 5.0
_SAY_SECONDS = 30.0

Say = Callable[[str], None]


def clear_build_locks(*, say: Say) -> None:
    """Remove the locks that killed builds have left, and say so; name those whose owner cannot be known."""
    for lock in build_locks(extensions_folder()):
        if lock.state != ABANDONED:
            say(f"{'note' if lock.state == BUILDING else 'warning'}: {lock}")
        elif remove_abandoned(lock.path):
            say(f"removed {lock}")


class BuildWatch:
    """Looks after the main thread: where it waits for the lock of a build, it says so and for whom."""

    def __init__(self, *, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._main = threading.main_thread().ident or 0
        self._since: dict[Path, float] = {}
        self._said: dict[Path, float] = {}

    def start(self) -> None:
        """Look every few seconds from now on, until the process ends."""
        threading.Thread(target=self._run, name="build locks", daemon=True).start()

    def look(self) -> None:
        """Look once: an abandoned lock is removed, which ends the waiting; for any other it is said what is up."""
        path = waited_for(frame_of(self._main))
        if path is None:
            self._since.clear()
            return
        now = self._clock()
        waited = now - self._since.setdefault(path, now)
        lock = judge(path)
        if lock.state == ABANDONED and remove_abandoned(path):
            self._say(f"removed {lock}")
        elif lock.state != ABANDONED and now - self._said.get(path, float("-inf")) >= _SAY_SECONDS:
            self._said[path] = now
            self._say(f"waiting for a build since {waited:.0f} s: {lock}")

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            self.look()
