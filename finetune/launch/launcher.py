"""`python -m finetune.launch.launcher WORDS` is `accelerate launch WORDS` with less noise.

A traceback of the launcher is useless after a stop request or a failed rank: the ranks print the reason themselves.
"""

import runpy
import sys
from types import TracebackType

_EXPECTED = ("SignalException", "ChildFailedError")
"""Errors of torchelastic's agent after a signal, and after the failure of a rank."""


def main() -> None:
    """Launch; the exit code is unchanged."""
    sys.excepthook = hide_expected
    runpy.run_module("accelerate.commands.launch", run_name="__main__", alter_sys=True)


def hide_expected(error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an error unless it is expected."""
    if error_type.__name__ not in _EXPECTED:
        sys.__excepthook__(error_type, error, trace)


if __name__ == "__main__":
    main()
