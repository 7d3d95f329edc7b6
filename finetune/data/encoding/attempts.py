"""What is wrong with one row is kept in its place: the others are encoded all the same."""

from collections.abc import Callable
from typing import Any, TypeVar

from finetune.errors import DataError

Made = TypeVar("Made")


def attempted(make: Callable[..., Made], *arguments: Any) -> Made | DataError:
    """Return what is made, or the DataError that says why it is not."""
    try:
        return make(*arguments)
    except DataError as error:
        return error
