"""The one place of the command line that imports inside a function.

Whatever trains, talks to a model or starts processes imports torch, which takes seconds, and reading a job file
imports pydantic; `--help` and `check` must answer at once. So a command names a function by its place, and what the
function needs is imported when it is called.
"""

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_OBJECTS_BETWEEN_COLLECTIONS = 50_000
"""While importing. Python's own 700 has it go through all that was imported again and again: a quarter of the time."""


def call(place: str, *arguments: Any, **named: Any) -> Any:
    """Import and call the function at `package.module:function`.

    >>> call("math:sqrt", 9.0)
    3.0
    """
    name, _, function = place.partition(":")
    with _lasting():
        module = importlib.import_module(name)
    return getattr(module, function)(*arguments, **named)


@contextmanager
def _lasting() -> Iterator[None]:
    """Seldom look for garbage meanwhile, and never again in what is there by then: modules last as long as the process.

    Processes that are forked later share it, too, as nobody touches it any more.
    """
    usual = gc.get_threshold()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *usual[1:])
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(*usual)
