"""What is to be known of a tokenizer beside the tokens that it makes."""

import hashlib
import json
from collections.abc import Mapping

from transformers import PreTrainedTokenizerBase


def unknown_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that stand for text which the tokenizer cannot represent; empty for byte-level ones."""
    unknown = {tokenizer.unk_token_id} - {
        None,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
    }  # GPT-2 names one for all
    return frozenset(map(int, unknown))


def forgets_unknown_text(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether text that the tokenizer does not know leaves no token at all, so that nobody can count it."""
    rare = ("\U00012000", "\U0001d11e", "\ua66e", "\u2603")  # cuneiform, a clef, an eye, a snowman
    known, *others = (
        tokenizer(f"a {sign}", add_special_tokens=False, verbose=False)["input_ids"] for sign in ("", *rare)
    )
    return any(ids == known for ids in others)


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, str]:
    """Return digests of everything about the tokenizer that the encoding depends on: part of a cache's key."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        parts = json.loads(backend.to_str())
        described = json.dumps({name: part for name, part in parts.items() if name not in ("truncation", "padding")})
    else:
        described = repr(sorted(tokenizer.get_vocab().items())) + repr(tokenizer.init_kwargs)
    special = repr((tokenizer.bos_token_id, tokenizer.eos_token_id, sorted(tokenizer.all_special_ids)))
    return {
        "tokenizer": _digest(type(tokenizer).__name__ + described + special),
        "chat_template": _digest(repr(tokenizer.chat_template)),
    }


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
