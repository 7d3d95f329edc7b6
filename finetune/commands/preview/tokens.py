"""Token ids as readable text, each piece with its ids and whether it is a target of the loss."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from finetune.data.features import Features
from finetune.data.templates.chat_template import is_special

REPLACEMENT_CHARACTER = "\ufffd"
"""The decoder's output for an incomplete character."""

MAX_CHARACTER_TOKENS = 8
"""The number of tokens after which an incomplete character is shown as is."""

MARKS = {" ": "·", "\t": "⇥", "\r": "␍", "\u00a0": "⍽"}
"""Marks for whitespace; a newline is marked and kept."""

NO_TEXT = "∅"
WHITESPACE_MARKS = frozenset([*MARKS.values(), "↵", "\n"])


@dataclass(frozen=True)
class Piece:
    """A token, or several tokens that together make up one character."""

    ids: tuple[int, ...]
    text: str
    is_target: bool
    is_special: bool

    @property
    def shown(self) -> str:
        """Return the text with visible whitespace; NO_TEXT if it is empty."""
        return visible(self.text) or NO_TEXT

    @property
    def runs(self) -> list[tuple[str, bool]]:
        """Return the shown text split into text and whitespace marks, with whether a part is marks."""
        return [
            ("".join(characters), is_blank)
            for is_blank, characters in groupby(self.shown, key=WHITESPACE_MARKS.__contains__)
        ]


@dataclass(frozen=True)
class Span:
    """Consecutive pieces that are all targets or all context."""

    pieces: tuple[Piece, ...]

    @property
    def is_target(self) -> bool:
        """Return whether the pieces are targets."""
        return self.pieces[0].is_target


def visible(text: str) -> str:
    """Return the text with visible whitespace, and with codes for other characters that are not printable.

    >>> visible("a b")
    'a·b'
    """
    return "".join(_visible(character) for character in text)


def pieces_of(features: Features, tokenizer: Any) -> Iterator[Piece]:
    """Yield the sample's tokens as text; a piece ends where a character does, or where targets start or end.

    Yields nothing for a sample without tokens. If the target is the whole sample, no token is a target.
    """
    ids = features.arrays["input_ids"].tolist() if "input_ids" in features.arrays else []
    is_target = features.arrays["is_target"].tolist() if "is_target" in features.arrays else [False] * len(ids)
    start = 0  # of the piece
    context_start = 0  # of the tokens that are decoded with it: a token's leading space depends on the one before
    for end in range(1, len(ids) + 1):
        before = _decoded(tokenizer, ids[context_start:start])
        text = _decoded(tokenizer, ids[context_start:end])[len(before) :]
        may_continue = end < len(ids) and is_target[end] == is_target[start] and end - start < MAX_CHARACTER_TOKENS
        if text.endswith(REPLACEMENT_CHARACTER) and may_continue:
            continue
        special = end == start + 1 and is_special(tokenizer, ids[start])
        yield Piece(tuple(ids[start:end]), text, is_target[start], special)
        context_start, start = start, end


def spans(pieces: Sequence[Piece]) -> list[Span]:
    """Return the pieces grouped into alternating spans of targets and context."""
    groups: list[list[Piece]] = []
    for piece in pieces:
        if groups and groups[-1][0].is_target == piece.is_target:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return [Span(tuple(group)) for group in groups]


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    if not ids:
        return ""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _visible(character: str) -> str:
    if character == "\n":
        return "↵\n"
    if character in MARKS:
        return MARKS[character]
    return character if character.isprintable() else f"⟨{ord(character):02X}⟩"
