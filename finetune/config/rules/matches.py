"""The first files that match a pattern, found in little time: a pattern may lead through a whole disk."""

import errno
import os
import threading
from itertools import islice
from pathlib import Path

_MOST = 1_000
_PATIENCE_SECONDS = 2.0


def some_matches(pattern: Path) -> list[Path] | None:
    """Return the first files that match, sorted; None where that takes long and it is left to the run to find them.

    Raises OSError where the pattern is none that can be followed.
    """
    search = _Search(pattern)
    thread = threading.Thread(target=search.run, daemon=True)
    thread.start()
    thread.join(_PATIENCE_SECONDS)
    if search.has_failed:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(pattern))
    return search.found


class _Search:
    """Looks for matches in a thread of its own, which nobody has to wait for."""

    def __init__(self, pattern: Path) -> None:
        self._pattern = pattern
        self.found: list[Path] | None = None
        self.has_failed = False

    def run(self) -> None:
        """Find the first matches."""
        pattern = self._pattern
        try:
            matches = Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))
            self.found = sorted(islice(matches, _MOST))
        except (OSError, ValueError, RecursionError, NotImplementedError):
            self.has_failed = True
