"""Whether all ranks call the same method of a session with the same arguments, or follow rank 0."""

import hashlib
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from finetune.errors import FinetuneError, LostContact, UserError
from finetune.run.session.rows import loss_name
from finetune.runtime import distributed
from finetune.runtime.supervision.exit import is_broken_collective

FOLLOW = "follow"


@dataclass(frozen=True)
class Call:
    """One call on one rank: the method, and a short text for each argument, several for a list."""

    method: str
    arguments: Mapping[str, tuple[str, ...]]


def agree(method: str, arguments: Mapping[str, Any]) -> tuple[Call, bool]:
    """Return rank 0's call, which is that of all ranks, or whether the others follow it. Collective.

    An argument is compared by itself, the elements of a list by their digests.
    Raises UserError naming the first difference on all ranks, LostContact where a rank is gone.
    """
    call = Call(method, {name: _describe(value) for name, value in arguments.items()})
    try:
        calls = distributed.gather_objects(call)
    except RuntimeError as error:
        if not is_broken_collective(error):
            raise
        raise LostContact(
            f"another process of the session is gone while this one calls `{method}`. Its own message says why."
        ) from error
    first, others = calls[0], calls[1:]
    if first.method == FOLLOW:
        raise UserError("follow: rank 0 leads, so it must not follow. Call `follow` on the other ranks only.")
    if others and all(other.method == FOLLOW for other in others):
        return first, True
    for rank, other in enumerate(others, 1):
        if difference := _difference(first, other, rank=rank):
            raise UserError(f"ranks call different things: {difference}. Every rank must make the same calls.")
    return first, False


def send_call(method: str, arguments: Mapping[str, Any]) -> None:
    """Send rank 0's call to the ranks that follow. Raises UserError on all if it cannot be sent. Collective."""
    try:
        content: bytes | str = pickle.dumps((method, dict(arguments)))
    except Exception as error:  # any exception that the argument's own code raises
        content = f"{method}: an argument cannot be sent to ranks that follow ({error}). Functions must be importable."
    distributed.broadcast_object(content)
    if isinstance(content, str):
        raise UserError(content)


def receive_call() -> tuple[str, dict[str, Any]]:
    """Return rank 0's method and arguments; raises UserError if they could not be sent. Collective."""
    content: bytes | str = distributed.broadcast_object(b"")
    if isinstance(content, str):
        raise UserError(content)
    try:
        method, arguments = pickle.loads(content)  # from rank 0 of this run
    except Exception as error:
        raise FinetuneError(f"a call of rank 0 cannot be read here: {error}.") from error
    return str(method), dict(arguments)


def _describe(value: Any) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return (loss_name(value) if callable(value) else str(value),)

    def plain(item: Any) -> Any:
        return item.tolist() if isinstance(item, np.ndarray | np.generic | torch.Tensor) else repr(item)

    texts = (json.dumps(element, default=plain, sort_keys=True) for element in value)
    return tuple(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest() for text in texts)


def _difference(first: Call, other: Call, *, rank: int) -> str | None:
    if first.method != other.method:
        return f"rank 0 calls `{first.method}`, and rank {rank} calls `{other.method}`"
    for name, values in first.arguments.items():
        others = other.arguments[name]
        if len(values) != len(others):
            counts = f"{len(values)} elements on rank 0 and {len(others)} on rank {rank}"
            return f"`{first.method}` is called with {counts} in `{name}`"
        for number, (one, another) in enumerate(zip(values, others, strict=True), 1):
            if one != another:
                where = f"element {number} of `{name}`" if len(values) > 1 else f"`{name}`"
                return f"{where} of `{first.method}` is not the same on rank 0 and rank {rank}"
    return None
