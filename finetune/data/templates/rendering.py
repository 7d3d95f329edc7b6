"""Turns rendered by the chat template, with the spans of its generation markers and the text around turns."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from finetune.data.templates.arguments import Arguments, arguments_of
from finetune.data.templates.sandbox import TemplateRefused, render_chat, run_sandboxed
from finetune.data.templates.static_check import is_bounded
from finetune.data.turns import Turn
from finetune.errors import DataError

Tools = Sequence[Mapping[str, Any]]
"""Tools that the assistant may call, as JSON schemas."""

_FAILURES = (
    *(TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError),
    *(SyntaxError, MemoryError),  # of what Jinja compiles to
)
"""What running somebody's template over somebody's turns can raise."""


_FILE = "file_of_chat_template"


@dataclass(frozen=True)
class Rendering:
    """A conversation as text; `marked` are the characters from-to between the template's generation markers."""

    text: str
    marked: tuple[tuple[int, int], ...] = ()


def render(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Turn],
    *,
    tools: Tools | None = None,
    arguments: Arguments | None = None,
    add_generation_prompt: bool = False,
) -> Rendering:
    """Return the turns as `tokenizer.apply_chat_template` renders them, with the generation prompt if asked to.

    The tokenizer's own arguments of its template are passed, and `arguments` in addition or in their place.
    Raises DataError with the template's own words when it refuses the turns.
    """
    try:
        template = str(tokenizer.get_chat_template(tools=tools))
        inputs = {
            # as apply_chat_template does: many templates write an absent value as the word None
            "conversations": [[{key: part for key, part in turn.items() if part is not None} for turn in turns]],
            "tools": tools,
            "chat_template": template,
            "add_generation_prompt": add_generation_prompt,
            "return_assistant_tokens_mask": has_markers(template),
            **tokenizer.special_tokens_map,
            **arguments_of(tokenizer),
            **(arguments or {}),
        }
        name = template_file(tokenizer)
        if name is None and is_bounded(template):
            text, marked = render_chat(inputs)
        else:
            text, marked = run_sandboxed(render_chat, inputs, name=name or "of the model", template=template)
    except (*_FAILURES, TemplateRefused) as error:
        roles = ", ".join(str(turn["role"]) for turn in turns)
        which = f" ({name})" if (name := template_file(tokenizer)) else ""
        raise DataError(f"the chat template{which} refuses the conversation ({roles}): {error}") from error
    return Rendering(text, tuple((start, end) for start, end in marked))


def template_file(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the file that the job names as chat template; None for one of ours, and for the tokenizer's own."""
    name: str | None = getattr(tokenizer, _FILE, None)
    return name


def set_template_file(tokenizer: PreTrainedTokenizerBase, name: str | None) -> None:
    """Keep in mind where the tokenizer's chat template comes from; it goes with the tokenizer to other processes."""
    setattr(tokenizer, _FILE, name)


@lru_cache(maxsize=8)
def has_markers(template: str) -> bool:
    """Return whether the template marks what the assistant says with `{% generation %}`."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


_PROBES = ("Xyzzy one", "Plugh two", "Xyzzy three", "Plugh four", "Xyzzy five")
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
            for role, text in zip(("user", "assistant", "user", "assistant", "user"), _PROBES, strict=True)
        ]
        try:
            yield render(tokenizer, turns, add_generation_prompt=True).text
            return
        except DataError:  # such as one that wants parts
            continue


def _around(rendered: str) -> Sequence[str]:
    """Return what stands between the contents, and behind the last."""
    places = [(rendered.find(text_of_turn), text_of_turn) for text_of_turn in _PROBES]
    found = [(place, place + len(text_of_turn)) for place, text_of_turn in places if place >= 0]
    between = [rendered[end:start] for (_, end), (start, _) in pairwise(found) if end <= start]
    return [*between, *(rendered[end:] for _, end in found[-1:])]
