"""Shared by all API functions: an unknown argument is an error with a suggestion, as an unknown key of a job is.

And what libraries write into the environment when they are imported does not stay there.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from finetune.config.formatting import did_you_mean, format_list
from finetune.errors import UserError
from finetune.runtime.processes import restored_environment

P = ParamSpec("P")
R = TypeVar("R")

Overrides = Mapping[str, Any]
"""Values by dotted key, such as `{"train.learning_rate": 1e-4}`."""


def api_function(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function, which raises UserError for an argument that it does not have, and restores os.environ."""
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in names:
                hint = did_you_mean(name, names) or f"It takes {format_list(names)}."
                raise UserError(f"{function.__name__}: there is no argument `{name}`. {hint}")
        with restored_environment():
            return function(*args, **kwargs)

    return call
