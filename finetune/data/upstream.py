"""Every workaround for `datasets` and transformers' tokenizers in this wing.

Each names the bug that it works around and when it can be removed; a test of each fails once it is no longer needed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase


def set_datasets_offline(datasets: Any, *, is_offline: bool) -> None:
    """Let `datasets` know whether the hub can be reached.

    It copies huggingface_hub's flag once, when it is imported (datasets 5.2, `datasets/config.py`), so a machine found
    to be offline later would retry for a minute. To be removed when it reads the flag at each use.
    """
    datasets.config.HF_HUB_OFFLINE = is_offline


@contextmanager
def truncating(tokenizer: PreTrainedTokenizerBase, side: Literal["end", "start"]) -> Iterator[None]:
    """Let the tokenizer cut off this side; afterwards neither side nor truncation stays set.

    A call with `truncation` leaves it enabled in the tokenizer's backend, which writes it to tokenizer.json when it is
    saved (transformers 5.23, `PreTrainedTokenizerFast.set_truncation_and_padding`). To be removed when calls leave no
    state behind.
    """
    before = tokenizer.truncation_side
    tokenizer.truncation_side = "right" if side == "end" else "left"
    try:
        yield
    finally:
        tokenizer.truncation_side = before
        if (backend := fast_backend(tokenizer)) is not None:
            backend.no_truncation()


def unrestricted_backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the tokenizer's `tokenizers.Tokenizer`, set to truncate and pad nothing; None for one written in Python.

    Earlier calls of the tokenizer may have left truncation or padding enabled in it: see `truncating`.
    """
    backend = fast_backend(tokenizer)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
    return backend


def fast_backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the tokenizer's `tokenizers.Tokenizer`; None for one written in Python."""
    return getattr(tokenizer, "backend_tokenizer", None)
