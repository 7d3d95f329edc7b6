"""Messages of a run before it has a run folder: printed at once, and kept for the event log."""

from collections.abc import Callable


def print_line(line: str) -> None:
    """Print the line at once."""
    print(line, flush=True)


class RunLog:
    """Says sentences on the main rank and remembers them; silent elsewhere."""

    def __init__(self, *, is_main: bool, write: Callable[[str], None] = print_line) -> None:
        self._is_main = is_main
        self._write = write
        self.said: list[str] = []

    def __call__(self, message: str) -> None:
        """Print the sentence now; the same one is said once."""
        if self._is_main and message not in self.said:
            self.said.append(message)
            self._write(message)
