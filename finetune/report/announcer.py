"""What is said before there is a run folder: printed at once, and kept for the event log."""

import sys


class Announcer:
    """Says sentences on the main rank and remembers them; silent elsewhere."""

    def __init__(self, *, is_main: bool) -> None:
        self._is_main = is_main
        self.said: list[str] = []

    def __call__(self, message: str) -> None:
        """Print the sentence now; the same one is said once."""
        if self._is_main and message not in self.said:
            self.said.append(message)
            print(message, file=sys.stdout, flush=True)
