"""Batch encoding of texts, token counts of text prefixes, special tokens of a tokenizer, and its identity."""

import hashlib
import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, takewhile
from typing import Any

import numpy as np
from tokenizers import processors
from transformers import PreTrainedTokenizerBase

from finetune.config.section import KeyLocations
from finetune.config.sections.data import DataSection
from finetune.data.templates.chat_template import set_chat_template
from finetune.data.templates.rendering import RECORDED_AS, arguments_of, use_arguments
from finetune.data.upstream import fast_backend, unrestricted_backend
from finetune.errors import DataError

_PROBE = "a b"


def num_special_tokens_around(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Return the number of tokens that the tokenizer adds before and after a text: (1, 1) for BERT, (0, 1) for T5."""
    whole = list(tokenizer(_PROBE, verbose=False)["input_ids"])
    bare = list(tokenizer(_PROBE, add_special_tokens=False, verbose=False)["input_ids"])
    special = set(map(int, tokenizer.all_special_ids)) - set(bare)
    before = sum(1 for _ in takewhile(special.__contains__, whole))
    after = sum(1 for _ in takewhile(special.__contains__, reversed(whole[before:])))
    return before, after


def has_double_bos(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the ids start with two beginning-of-sequence tokens."""
    return tokenizer.bos_token_id is not None and list(ids[:2]) == [tokenizer.bos_token_id] * 2


def require_eos_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the end-of-sequence token; raises DataError for a tokenizer without one."""
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end-of-sequence token, so the model cannot learn when to stop. Set "
            "`eos_token` in its tokenizer_config.json, or use another one."
        )
    return int(tokenizer.eos_token_id)


def unknown_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens of text that is not in the vocabulary; empty for byte-level tokenizers."""
    unknown = {tokenizer.unk_token_id} - {
        None,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
    }  # GPT-2 uses one token for all of these
    return frozenset(map(int, unknown))


def drops_unknown_text(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether text outside the vocabulary produces no token at all, so that it cannot be counted."""
    rare = ("\U00012000", "\U0001d11e", "\ua66e", "\u2603")  # cuneiform, a clef, an eye, a snowman
    known, *others = (
        tokenizer(f"a {sign}", add_special_tokens=False, verbose=False)["input_ids"] for sign in ("", *rare)
    )
    return any(ids == known for ids in others)


def prepare_tokenizer(
    tokenizer: PreTrainedTokenizerBase, data: DataSection, *, locations: KeyLocations, log: Callable[[str], None]
) -> None:
    """Set the job's chat template and its arguments; log the tokenizer's own ones, and that it drops unknown text."""
    set_chat_template(tokenizer, data.chat_template)
    use_arguments(tokenizer, data.chat_template_arguments, locations)
    if data.chat_template_arguments is None and (brought := arguments_of(tokenizer)):
        log(
            f"the tokenizer comes with chat template arguments, which are used: {json.dumps(dict(brought))}. "
            "`data.chat_template_arguments` replaces them."
        )
    if drops_unknown_text(tokenizer):
        log(
            "warning: the tokenizer has neither an unknown token nor bytes: characters that it does not know are "
            "dropped silently. Look at `finetune preview`, or choose another tokenizer."
        )


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, str]:
    """Return digests of everything in the tokenizer that affects the encoding: part of a cache's key."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        parts = json.loads(backend.to_str())
        description = json.dumps({name: part for name, part in parts.items() if name not in ("truncation", "padding")})
    else:
        init_options = {name: value for name, value in tokenizer.init_kwargs.items() if name != RECORDED_AS}
        description = repr(sorted(tokenizer.get_vocab().items())) + repr(init_options)
    arguments = arguments_of(tokenizer)
    special = repr((tokenizer.bos_token_id, tokenizer.eos_token_id, sorted(tokenizer.all_special_ids)))
    return {
        "tokenizer": _digest(type(tokenizer).__name__ + description + special),
        "chat_template": _digest(repr(tokenizer.chat_template)),
        **({RECORDED_AS: _digest(json.dumps(arguments, sort_keys=True))} if arguments else {}),
    }


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


_LONGEST_REMEMBERED = 128  # characters
_MAX_REMEMBERED = 4096
_PROBES = ("a b", " a", "a ", "\n", "a\n\nb", "  ", "\u00e9\u4f60 1", "a.")


class TextTokenizer:
    """Encodes texts that already contain their special tokens; none are added."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._remembered: dict[str, list[int]] = {}
        added = tokenizer.added_tokens_decoder
        self.special = frozenset(map(int, tokenizer.all_special_ids)) | {
            i for i, token in added.items() if token.special
        }
        # normalized tokens are matched after the text is normalized; the unknown token stands for any text
        unknown = tokenizer.unk_token_id
        self.seams = {token_id: str(token.content) for token_id, token in added.items() if not token.normalized}
        self.seams = {token_id: content for token_id, content in self.seams.items() if token_id != unknown}
        self.is_seam = np.zeros(max(self.seams, default=-1) + 1, dtype=bool)
        self.is_seam[list(self.seams)] = True

    def encode(self, texts: Sequence[str]) -> "list[EncodedText]":
        """Return each text with its tokens, encoded in one batch."""
        if not self.cuts_at_seams:
            return [EncodedText(text, np.asarray(self.ids(text), np.uint32), self) for text in texts]
        encodings = unrestricted_backend(self._tokenizer).encode_batch(list(texts), add_special_tokens=False)
        return [
            EncodedText(text, np.array(each.ids, np.uint32), self, each)
            for text, each in zip(texts, encodings, strict=True)
        ]

    def begun(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text with the tokenizer's special tokens; an empty list for an empty text."""
        if not self.is_backend_alone:
            return [list(self._tokenizer(text, verbose=False)["input_ids"]) if text else [] for text in texts]
        encodings = unrestricted_backend(self._tokenizer).encode_batch_fast(list(texts))
        return [each.ids if text else [] for text, each in zip(texts, encodings, strict=True)]

    def ids(self, text: str) -> list[int]:
        """Return the tokens of one text, uncached."""
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def remembered(self, text: str) -> list[int]:
        """Return the tokens of one text; short texts are cached."""
        ids = self._remembered.get(text)
        if ids is None:
            ids = self.ids(text)
            if len(text) <= _LONGEST_REMEMBERED and len(self._remembered) < _MAX_REMEMBERED:
                self._remembered[text] = ids
        return ids

    @cached_property
    def is_backend_alone(self) -> bool:
        """Whether the `tokenizers` backend alone produces the tokens, without changes in Python."""
        backend = unrestricted_backend(self._tokenizer)
        if backend is None:
            return False
        theirs = [list(self._tokenizer(text, verbose=False)["input_ids"]) for text in _PROBES]
        return theirs == [each.ids for each in backend.encode_batch_fast(list(_PROBES))]

    @cached_property
    def cuts_at_seams(self) -> bool:
        """Whether the tokenizer encodes the texts on both sides of an added token independently.

        Tested on texts that reveal tokenizers which mark the start of a text or of a word.
        """
        if not self.is_backend_alone or not self.seams:
            return False
        seams = [*islice(self.seams.values(), 2), *islice(reversed(self.seams.values()), 2)]
        pairs = [(a, b) for shift in (1, 4) for a, b in zip(_PROBES, _PROBES[shift:] + _PROBES[:shift], strict=True)]
        texts = [f"{a}{seam}{b}{seams[0]}{a}" for seam in seams for a, b in pairs]
        encodings = unrestricted_backend(self._tokenizer).encode_batch(texts, add_special_tokens=False)
        is_independent = True
        for text, encoding in zip(texts, encodings, strict=True):
            fast = EncodedText(text, np.array(encoding.ids, np.uint32), self, encoding)
            slow = EncodedText(text, np.asarray(self.ids(text), np.uint32), self)
            has_same_ends = all(
                fast.num_tokens_of(end) == slow.num_tokens_of(end) for end in range(0, len(text) + 1, 3)
            )
            if not has_same_ends or fast.ids.tolist() != slow.ids.tolist():
                is_independent = False
                break
        self._remembered.clear()
        return is_independent


@dataclass(frozen=True)
class EncodedText:
    """A text and its tokens."""

    text: str
    ids: np.ndarray  # uint32
    tokens: TextTokenizer
    encoding: Any = field(default=None, repr=False)  # of the `tokenizers` library; None: prefixes are encoded in full

    def num_tokens_of(self, end: int) -> int | None:
        """Return the number of tokens of the first `end` characters, or None if these are not a prefix of `ids`.

        Equivalent to encoding the prefix alone and comparing.
        """
        if end == len(self.text):
            return len(self.ids)
        first = start = 0  # of the text after the last seam before `end`
        if self.encoding is not None:
            positions, starts = self._seams
            last = bisect_left(starts, end) - 1
            if last >= 0:
                first, start = positions[last], starts[last]
        expected = self.tokens.remembered(self.text[start:end])
        stop = first + len(expected)
        return stop if self.ids[first:stop].tolist() == expected else None

    @cached_property
    def _seams(self) -> tuple[list[int], list[int]]:
        """The added tokens that split the text, as token positions and as character offsets."""
        is_seam, ids = self.tokens.is_seam, self.ids
        positions, starts = [], []
        for position in np.flatnonzero(is_seam[np.minimum(ids, len(is_seam) - 1)] & (ids < len(is_seam))).tolist():
            start, end = self.encoding.token_to_chars(position)
            if self.text[start:end].strip() == self.tokens.seams[int(ids[position])].strip():
                positions.append(position)
                starts.append(start)
        return positions, starts


def append_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the tokenizer append end-of-sequence to every text, also when it is saved and loaded again.

    Raises DataError for a tokenizer without such a token, or one that cannot be changed.
    """
    eos = require_eos_id(tokenizer)
    if ends_with_eos(tokenizer):
        return
    backend, settings = fast_backend(tokenizer), tokenizer.init_kwargs
    if "add_bos_token" in settings or "add_eos_token" in settings:  # then loading rebuilds the post-processor
        settings["add_eos_token"] = True
        tokenizer.add_eos_token = True
    elif backend is not None:
        name = str(tokenizer.eos_token)
        last = processors.TemplateProcessing(
            single=f"$A:0 {name}:0", pair=f"$A:0 $B:1 {name}:1", special_tokens=[(name, eos)]
        )
        before = backend.post_processor
        backend.post_processor = last if before is None else processors.Sequence([before, last])
    if not ends_with_eos(tokenizer):
        raise DataError(
            f"task.embedding.pooling: `last_token` reads the end-of-sequence token, and this tokenizer "
            f"({type(tokenizer).__name__}) cannot be made to append it. Use one with a tokenizer.json, or `mean`."
        )


def ends_with_eos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer appends end-of-sequence to every text."""
    ids = list(tokenizer("a b", verbose=False)["input_ids"])
    return bool(ids) and ids[-1] == tokenizer.eos_token_id
