"""Names of classes and functions in files of earlier runs, whatever they are called and wherever they stand today."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

_ATTRIBUTE = "__recorded_name__"

Definition = TypeVar("Definition")


def recorded_as(name: str) -> Callable[[Definition], Definition]:
    """Return a decorator that gives a class or a function the name under which digests know it.

    Digests of prepared data and checkpoints depend on the name: it is never changed, even where the class moves or is
    called otherwise. It is written without the package's name in front.
    """

    def give(definition: Definition) -> Definition:
        setattr(definition, _ATTRIBUTE, name)
        return definition

    return give


def recorded_name(value: Any) -> str | None:
    """Return the recorded name of a function, or of an instance's own class; None: it has none, nor do subclasses."""
    owner = getattr(value, "__func__", value)
    own = vars(owner if inspect.isfunction(owner) else type(owner))
    name: str | None = own.get(_ATTRIBUTE)
    return name
