"""`python -m finetune.launch.supervisor.launcher WORDS` is `accelerate launch WORDS` with less noise.

A traceback of the launcher says nothing where ranks were asked to stop, or have failed: they have said why themselves.
"""

import runpy
import sys
from types import TracebackType

_EXPECTED = ("SignalException", "ChildFailedError")
"""What torchelastic's agent raises after a signal, and after the failure of a rank."""


def main() -> None:
    """Launch; the exit code stays what it is."""
    sys.excepthook = _hide_expected
    runpy.run_module("accelerate.commands.launch", run_name="__main__", alter_sys=True)


def _hide_expected(error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if error_type.__name__ not in _EXPECTED:
        sys.__excepthook__(error_type, error, trace)


if __name__ == "__main__":
    main()
