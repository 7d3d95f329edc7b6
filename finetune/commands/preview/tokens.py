"""Token ids as readable text, each piece with its ids and whether it is a target of the loss."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from finetune.data.features import Features
from finetune.data.templates.chat_template import is_special

REPLACEMENT_CHARACTER = "\ufffd"
"""What a decoder writes for a character of which only some bytes are there."""

LONGEST_CHARACTER = 8
"""Tokens after which a character that does not end is shown as it is."""

MARKS = {" ": "·", "\t": "⇥", "\r": "␍", "\u00a0": "⍽"}
"""What stands for blanks; a line break is marked and kept."""

NO_TEXT = "∅"
WHITESPACE_MARKS = frozenset([*MARKS.values(), "↵", "\n"])


@dataclass(frozen=True)
class Piece:
    """One token, or the tokens that only together make a character."""

    ids: tuple[int, ...]
    text: str
    is_target: bool
    is_special: bool

    @property
    def shown(self) -> str:
        """Return the text with its blanks made visible; what is no text at all is shown as NO_TEXT."""
        return visible(self.text) or NO_TEXT

    @property
    def runs(self) -> list[tuple[str, bool]]:
        """Return the same in turns of text and of marks for blanks, each with whether it is marks."""
        return [
            ("".join(characters), is_blank)
            for is_blank, characters in groupby(self.shown, key=WHITESPACE_MARKS.__contains__)
        ]


@dataclass(frozen=True)
class Span:
    """Pieces that follow one another and are all targets, or all context."""

    pieces: tuple[Piece, ...]

    @property
    def is_target(self) -> bool:
        """Return whether they are targets."""
        return self.pieces[0].is_target


def visible(text: str) -> str:
    """Return the text with its blanks made visible, and other characters that print nothing by their code.

    >>> visible("a b")
    'a·b'
    """
    return "".join(_visible(character) for character in text)


def pieces_of(features: Features, tokenizer: Any) -> Iterator[Piece]:
    """Yield the sample's tokens as text; a piece ends where a character does, or targets begin or end.

    None of a sample without tokens; where the sample as a whole is the target, no token is.
    """
    ids = features.arrays["input_ids"].tolist() if "input_ids" in features.arrays else []
    is_target = features.arrays["is_target"].tolist() if "is_target" in features.arrays else [False] * len(ids)
    start, begun = 0, 0  # of the piece; of what is decoded with it, since a token's blank depends on the one before
    for end in range(1, len(ids) + 1):
        before = _decoded(tokenizer, ids[begun:start])
        text = _decoded(tokenizer, ids[begun:end])[len(before) :]
        goes_on = end < len(ids) and is_target[end] == is_target[start] and end - start < LONGEST_CHARACTER
        if text.endswith(REPLACEMENT_CHARACTER) and goes_on:
            continue
        special = end == start + 1 and is_special(tokenizer, ids[start])
        yield Piece(tuple(ids[start:end]), text, is_target[start], special)
        begun, start = start, end


def spans(pieces: Sequence[Piece]) -> list[Span]:
    """Return the pieces in stretches of targets and of context, in turn."""
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
