"""Calls a function on rank 0 or on all ranks; when it fails on one rank, its error is raised on all of them."""

from collections.abc import Callable
from typing import TypeVar

from finetune.errors import CheckpointError, FinetuneError
from finetune.runtime import distributed
from finetune.runtime.distributed import Group

T = TypeVar("T")


def run_on_all_ranks(function: Callable[[], T], *, group: Group = Group.MAIN) -> list[T]:
    """Call `function` on every rank and return all values; if it fails on one, raise its error on all. Collective.

    `function` must not be collective: ranks would wait for one that has failed. No rank returns before all are done.
    """
    value, failure = _attempt(function)
    outcomes = distributed.gather_objects((value, error_text(failure) if failure is not None else None), group=group)
    for rank, (_, error) in enumerate(outcomes):
        if error is not None:
            where = f" (on rank {rank})" if distributed.world() > 1 else ""
            raise CheckpointError(error + where) from failure
    return [value for value, _ in outcomes]  # type: ignore[misc]  # no failure, so there is a value


def run_on_rank_0(function: Callable[[], T], *, group: Group = Group.MAIN) -> T:
    """Call `function` on rank 0 and return its value on all ranks; if it fails, raise its error on all. Collective.

    No rank returns before rank 0 is done.
    """
    value, failure = _attempt(function) if distributed.is_main() else (None, None)
    value, error = distributed.broadcast_object(
        (value, error_text(failure) if failure is not None else None), group=group
    )
    if error is not None:
        raise CheckpointError(error) from failure
    return value  # type: ignore[return-value]  # no failure, so there is a value


def error_text(error: BaseException) -> str:
    """Return the message of an error, with its type unless it is one of this package's."""
    return str(error) if isinstance(error, FinetuneError | OSError) else f"{type(error).__name__}: {error}"


def _attempt(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return function(), None
    except Exception as error:  # of any type: the other ranks must learn of it
        return None, error
