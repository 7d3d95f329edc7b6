"""Tokenizer: many texts encoded at once, prefixes of them, beginning and end of sequences, and what identifies it."""

import hashlib
import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, takewhile
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.data.templates.arguments import RECORDED_AS, arguments_of
from finetune.data.upstream import unrestricted_backend
from finetune.errors import DataError

_PROBE = "a b"


def num_special_tokens_around(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Return how many tokens the tokenizer writes before every text and behind it: BERT's are (1, 1), T5's (0, 1)."""
    whole = list(tokenizer(_PROBE, verbose=False)["input_ids"])
    bare = list(tokenizer(_PROBE, add_special_tokens=False, verbose=False)["input_ids"])
    special = set(map(int, tokenizer.all_special_ids)) - set(bare)
    before = sum(1 for _ in takewhile(special.__contains__, whole))
    behind = sum(1 for _ in takewhile(special.__contains__, reversed(whole[before:])))
    return before, behind


def has_double_bos(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether the beginning-of-sequence stands at the beginning twice."""
    return tokenizer.bos_token_id is not None and list(ids[:2]) == [tokenizer.bos_token_id] * 2


def require_eos_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the end-of-sequence token; raises DataError for a tokenizer without one."""
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end-of-sequence token, so the model cannot learn where to stop. Set "
            "`eos_token` in its tokenizer_config.json, or use another one."
        )
    return int(tokenizer.eos_token_id)


def unknown_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that stand for text which the tokenizer cannot represent; empty for byte-level ones."""
    unknown = {tokenizer.unk_token_id} - {
        None,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
    }  # GPT-2 names one for all
    return frozenset(map(int, unknown))


def drops_unknown_text(tokenizer: PreTrainedTokenizerBase) -> bool:
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
        made_with = {name: value for name, value in tokenizer.init_kwargs.items() if name != RECORDED_AS}
        described = repr(sorted(tokenizer.get_vocab().items())) + repr(made_with)
    arguments = arguments_of(tokenizer)
    special = repr((tokenizer.bos_token_id, tokenizer.eos_token_id, sorted(tokenizer.all_special_ids)))
    return {
        "tokenizer": _digest(type(tokenizer).__name__ + described + special),
        "chat_template": _digest(repr(tokenizer.chat_template)),
        **({RECORDED_AS: _digest(json.dumps(arguments, sort_keys=True))} if arguments else {}),
    }


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


_LONGEST_REMEMBERED = 128  # characters
_MAX_REMEMBERED = 4096
_PROBES = ("a b", " a", "a ", "\n", "a\n\nb", "  ", "\u00e9\u4f60 1", "a.")


class TextTokenizer:
    """Encodes texts that already hold every special token they need: none is added."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._remembered: dict[str, list[int]] = {}
        added = tokenizer.added_tokens_decoder
        self.special = frozenset(map(int, tokenizer.all_special_ids)) | {i for i, each in added.items() if each.special}
        # a normalized one is looked for only after the text around it was changed; the unknown one stands for any text
        unknown = tokenizer.unk_token_id
        self._seams = {token: str(each.content) for token, each in added.items() if not each.normalized}
        self._seams = {token: content for token, content in self._seams.items() if token != unknown}
        self._is_seam = np.zeros(max(self._seams, default=-1) + 1, dtype=bool)
        self._is_seam[list(self._seams)] = True

    def encode(self, texts: Sequence[str]) -> "list[EncodedText]":
        """Return each text with its tokens, encoded in one call."""
        if not self.cuts_at_seams:
            return [EncodedText(text, np.asarray(self.ids(text), np.uint32), self) for text in texts]
        encodings = unrestricted_backend(self._tokenizer).encode_batch(list(texts), add_special_tokens=False)
        return [
            EncodedText(text, np.array(each.ids, np.uint32), self, each)
            for text, each in zip(texts, encodings, strict=True)
        ]

    def begun(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text as the tokenizer begins and ends it of its own; none for an empty text."""
        if not self.is_backend_alone:
            return [list(self._tokenizer(text, verbose=False)["input_ids"]) if text else [] for text in texts]
        encodings = unrestricted_backend(self._tokenizer).encode_batch_fast(list(texts))
        return [each.ids if text else [] for text, each in zip(texts, encodings, strict=True)]

    def ids(self, text: str) -> list[int]:
        """Return the tokens of one text, from the tokenizer itself."""
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def remembered(self, text: str) -> list[int]:
        """Return the tokens of one text; those of short texts are looked up the second time."""
        ids = self._remembered.get(text)
        if ids is None:
            ids = self.ids(text)
            if len(text) <= _LONGEST_REMEMBERED and len(self._remembered) < _MAX_REMEMBERED:
                self._remembered[text] = ids
        return ids

    def seams(self, encoded: "EncodedText") -> tuple[list[int], list[int]]:
        """Return where the text is cut, both as places among its tokens and as characters."""
        ids = encoded.ids
        places = np.flatnonzero(self._is_seam[np.minimum(ids, len(self._is_seam) - 1)] & (ids < len(self._is_seam)))
        found: tuple[list[int], list[int]] = ([], [])
        for place in places.tolist():
            start, end = encoded.encoding.token_to_chars(place)
            if encoded.text[start:end].strip() == self._seams[int(ids[place])].strip():
                found[0].append(place)
                found[1].append(start)
        return found

    @cached_property
    def is_backend_alone(self) -> bool:
        """Whether the library `tokenizers` alone gives the tokens, nothing being added or changed in Python."""
        backend = unrestricted_backend(self._tokenizer)
        if backend is None:
            return False
        theirs = [list(self._tokenizer(text, verbose=False)["input_ids"]) for text in _PROBES]
        return theirs == [each.ids for each in backend.encode_batch_fast(list(_PROBES))]

    @cached_property
    def cuts_at_seams(self) -> bool:
        """Whether the tokenizer encodes what stands on both sides of an added token apart from each other.

        Tried on texts in which a tokenizer that marks the beginning of a text, or of a word, would show it.
        """
        if not self.is_backend_alone or not self._seams:
            return False
        seams = [*islice(self._seams.values(), 2), *islice(reversed(self._seams.values()), 2)]
        pairs = [(a, b) for shift in (1, 4) for a, b in zip(_PROBES, _PROBES[shift:] + _PROBES[:shift], strict=True)]
        texts = [f"{a}{seam}{b}{seams[0]}{a}" for seam in seams for a, b in pairs]
        encodings = unrestricted_backend(self._tokenizer).encode_batch(texts, add_special_tokens=False)
        is_so = all(self._cuts(text, encoding) for text, encoding in zip(texts, encodings, strict=True))
        self._remembered.clear()
        return is_so

    def _cuts(self, text: str, encoding: Any) -> bool:
        fast = EncodedText(text, np.array(encoding.ids, np.uint32), self, encoding)
        slow = EncodedText(text, np.asarray(self.ids(text), np.uint32), self)
        ends = range(0, len(text) + 1, 3)
        same_ends = all(fast.num_tokens_of(end) == slow.num_tokens_of(end) for end in ends)
        return same_ends and fast.ids.tolist() == slow.ids.tolist()


@dataclass(frozen=True)
class EncodedText:
    """A text and its tokens."""

    text: str
    ids: np.ndarray  # uint32
    tokens: TextTokenizer
    encoding: Any = field(default=None, repr=False)  # of the `tokenizers` library; None: beginnings are encoded in full

    def num_tokens_of(self, end: int) -> int | None:
        """Return how many tokens the first `end` characters make, or None where those are not the text's first tokens.

        Exactly what encoding the beginning alone and comparing gives.
        """
        if end == len(self.text):
            return len(self.ids)
        first, start = self._seam_before(end)
        expected = self.tokens.remembered(self.text[start:end])
        stop = first + len(expected)
        return stop if self.ids[first:stop].tolist() == expected else None

    def _seam_before(self, end: int) -> tuple[int, int]:
        if self.encoding is None:
            return 0, 0
        places, starts = self._seams
        last = bisect_left(starts, end) - 1
        return (places[last], starts[last]) if last >= 0 else (0, 0)

    @cached_property
    def _seams(self) -> tuple[list[int], list[int]]:
        return self.tokens.seams(self)
