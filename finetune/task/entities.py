"""Entities in tagged words, found and compared as CoNLL's evaluation and `seqeval` do.

A tag is `O`, or where in an entity a word stands (`B`egin, `I`nside; also `E`nd and `S`ingle) and of which type it is:
`B-LOC`. Source: https://www.clips.uantwerpen.be/conll2000/chunking/conlleval.txt (Tjong Kim Sang and Buchholz, 2000).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Entity = tuple[int, int, str]
"""First and last word of an entity, and its type."""

OUTSIDE = "O"
_PLACES = re.compile(r"[BIES]-.+", re.DOTALL)


def are_entity_tags(names: Iterable[str]) -> bool:
    """Tell whether the classes are such tags, with some that begin an entity."""
    inside = [name for name in names if name != OUTSIDE]
    return all(_PLACES.fullmatch(name) for name in inside) and any(name.startswith("B-") for name in inside)


def entities(tags: Sequence[str]) -> Iterator[Entity]:
    """Yield the entities of one sentence in their order.

    An entity begins at `B` and `S`, and wherever another type or an entity behind `O`, `E` or `S` goes on.
    """
    start, before = 0, (OUTSIDE, "")
    for number, tag in enumerate([*tags, OUTSIDE]):
        here = _parted(tag)
        if before[0] != OUTSIDE and _ends(before, here):
            yield start, number - 1, before[1]
        if here[0] != OUTSIDE and _begins(before, here):
            start = number
        before = here


@dataclass(frozen=True)
class EntityScores:
    """How many entities are found, exactly: the same words and the same type."""

    precision: float
    recall: float
    f1: float


def entity_scores(sentences: Iterable[tuple[Sequence[str], Sequence[str]]]) -> EntityScores:
    """Return precision, recall and F1 over the entities of all sentences, each its right and its predicted tags.

    A share of nothing is 0.
    """
    num_right = num_predicted = num_true = 0
    for tags, predicted in sentences:
        there, found = set(entities(tags)), set(entities(predicted))
        num_true, num_predicted = num_true + len(there), num_predicted + len(found)
        num_right += len(there & found)
    precision = num_right / num_predicted if num_predicted else 0.0
    recall = num_right / num_true if num_true else 0.0
    f1 = 2 * num_right / (num_predicted + num_true) if num_right else 0.0
    return EntityScores(precision, recall, f1)


def _parted(tag: str) -> tuple[str, str]:
    place, _, kind = tag.partition("-")
    return place, kind


def _ends(before: tuple[str, str], here: tuple[str, str]) -> bool:
    """Tell whether the entity of the word before is over."""
    return before[0] in "ES" or here[0] in "BSO" or before[1] != here[1]


def _begins(before: tuple[str, str], here: tuple[str, str]) -> bool:
    """Tell whether an entity begins at this word."""
    return here[0] in "BS" or before[0] in "ESO" or before[1] != here[1]
