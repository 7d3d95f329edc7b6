"""Log handlers of libraries that a server has imported write to the streams of the program forked from it."""

import logging
import sys


class _PresentStream:
    """`sys.stderr` as it is when something is asked of it."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()

    def fileno(self) -> int:
        return sys.stderr.fileno()


def log_to_present_stream() -> None:
    """Redirect every handler that keeps a stream of its own; handlers of files stay, and those that have none yet."""
    loggers = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    for handler in (handler for logger in (logging.root, *loggers) for handler in logger.handlers):
        if vars(handler).get("stream") is not None and not isinstance(handler, logging.FileHandler):
            handler.stream = _PresentStream()  # type: ignore[attr-defined]
