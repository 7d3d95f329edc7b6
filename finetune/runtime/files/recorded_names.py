"""Names of classes and functions in files of earlier runs, independent of their current names and modules."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

_ATTRIBUTE = "__recorded_name__"

Definition = TypeVar("Definition")


def recorded_as(name: str) -> Callable[[Definition], Definition]:
    """Return a decorator that sets the name of a class or function in digests.

    Digests of prepared data and checkpoints depend on it, so it never changes, even if the class is moved or renamed.
    It does not include the package's name.
    """

    def record(definition: Definition) -> Definition:
        setattr(definition, _ATTRIBUTE, name)
        return definition

    return record


def recorded_name(value: Any) -> str | None:
    """Return the recorded name of a function, or of an instance's own class; None without one."""
    owner = getattr(value, "__func__", value)
    own = vars(owner if inspect.isfunction(owner) else type(owner))
    name: str | None = own.get(_ATTRIBUTE)
    return name
