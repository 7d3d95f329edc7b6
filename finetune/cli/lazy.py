"""The one place of the command line that imports inside a function.

Whatever trains, talks to a model or starts processes imports torch, which takes seconds, and reading a job file
imports pydantic; `--help` and `check` must answer at once. So a command names a function by its place, and what the
function needs is imported when it is called.
"""

import importlib
from typing import Any


def call(place: str, *arguments: Any, **named: Any) -> Any:
    """Import and call the function at `package.module:function`.

    >>> call("math:sqrt", 9.0)
    3.0
    """
    module, _, function = place.partition(":")
    return getattr(importlib.import_module(module), function)(*arguments, **named)
