"""Messages before the run folder exists: printed immediately, and kept for the event log."""

from collections.abc import Callable


def print_line(line: str) -> None:
    """Print the line and flush."""
    print(line, flush=True)


class RunLog:
    """Prints messages on rank 0 and keeps them; silent on other ranks."""

    def __init__(self, *, is_main: bool, write: Callable[[str], None] = print_line) -> None:
        self._is_main = is_main
        self._write = write
        self.messages: list[str] = []

    def __call__(self, message: str) -> None:
        """Print the message; repeated messages are printed once."""
        if self._is_main and message not in self.messages:
            self.messages.append(message)
            self._write(message)
