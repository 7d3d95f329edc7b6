"""Turn marks: what a chat template writes around the contents of turns, found by rendering a small conversation."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

from finetune.data.encoding.rendering import render
from finetune.data.formats.turns import Turn
from finetune.errors import DataError

_SAID = ("Xyzzy one", "Plugh two", "Xyzzy three", "Plugh four", "Xyzzy five")
_OF_CONTENT = re.compile("think|thought|reason|tool|function|call|image|video|audio", re.IGNORECASE)
"""Added tokens with such names mark parts of what a turn says, which rows may write themselves."""

_IN_BRACKETS = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]|<<?/?[A-Z]+>>?")


def turn_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return the added tokens, not special ones, that the chat template begins or ends turns with."""
    added = {str(each.content) for each in tokenizer.added_tokens_decoder.values() if not each.special}
    added = {name for name in added if not _OF_CONTENT.search(name)}
    if not added or not tokenizer.chat_template:
        return frozenset()
    written = "\n".join(text for rendered in _renderings(tokenizer) for text in _around(rendered))
    return frozenset(name for name in added if name.strip() and name in written)


def plain_turn_marks(tokenizer: PreTrainedTokenizerBase, names: frozenset[str]) -> re.Pattern[str] | None:
    """Return what finds turn marks that are plain text, such as `### Assistant:`; None where the template has none.

    `names` are those of control tokens: a mark that holds one of them cannot be forged.
    """
    marks: set[str] = set()
    for rendered in _renderings(tokenizer) if tokenizer.chat_template else ():
        for text in _around(rendered):
            mark = text.strip()
            if len(mark) > 1 and not mark.isalnum() and not any(name in mark for name in names):
                marks.add(r"\s+".join(map(re.escape, mark.split())))
                marks.update(map(re.escape, _IN_BRACKETS.findall(mark)))
    return re.compile("|".join(sorted(marks))) if marks else None


def _renderings(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    for as_parts in (False, True):
        turns: list[Turn] = [
            {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text}
            for role, text in zip(("user", "assistant", "user", "assistant", "user"), _SAID, strict=True)
        ]
        try:
            yield render(tokenizer, turns, with_answer_cue=True).text
            return
        except DataError:  # such as one that wants parts
            continue


def _around(rendered: str) -> Sequence[str]:
    """Return what stands between the contents, and behind the last."""
    places = [(rendered.find(said), said) for said in _SAID]
    found = [(place, place + len(said)) for place, said in places if place >= 0]
    between = [rendered[end:start] for (_, end), (start, _) in pairwise(found) if end <= start]
    return [*between, *(rendered[end:] for _, end in found[-1:])]
