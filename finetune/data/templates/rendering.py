"""Renders turns with the chat template, and finds the spans of its generation markers and the text around turns."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from finetune.data.templates.arguments import Arguments, arguments_of
from finetune.data.templates.sandbox import TemplateRefused, is_bounded, render_chat, run_sandboxed
from finetune.data.turns import Turn
from finetune.errors import DataError

Tools = Sequence[Mapping[str, Any]]
"""Tools that the assistant may call, as JSON schemas."""

_FAILURES = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    SyntaxError,  # of the Python code to which Jinja compiles
    MemoryError,
)
"""The exceptions that rendering an arbitrary template can raise."""


_FILE = "file_of_chat_template"


@dataclass(frozen=True)
class Rendering:
    """A conversation as text; `marked` are the character ranges between the template's generation markers."""

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
    """Return the turns as `tokenizer.apply_chat_template` renders them, optionally with the generation prompt.

    The tokenizer's own template arguments are passed, overridden by `arguments`. Raises DataError with the template's
    message if it refuses the turns.
    """
    try:
        template = str(tokenizer.get_chat_template(tools=tools))
        inputs = {
            # without absent values, which many templates would write as the word None
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
        file = f" ({name})" if (name := template_file(tokenizer)) else ""
        raise DataError(f"the chat template{file} refuses the conversation ({roles}): {error}") from error
    return Rendering(text, tuple((start, end) for start, end in marked))


def template_file(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the job's chat template file; None for a built-in template and for the tokenizer's own."""
    name: str | None = getattr(tokenizer, _FILE, None)
    return name


def set_template_file(tokenizer: PreTrainedTokenizerBase, name: str | None) -> None:
    """Record the file of the tokenizer's chat template; it is pickled with the tokenizer."""
    setattr(tokenizer, _FILE, name)


@lru_cache(maxsize=8)
def has_markers(template: str) -> bool:
    """Return whether the template marks the assistant's text with `{% generation %}`."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


_PROBES = ("Xyzzy one", "Plugh two", "Xyzzy three", "Plugh four", "Xyzzy five")
_OF_CONTENT = re.compile("think|thought|reason|tool|function|call|image|video|audio", re.IGNORECASE)
"""Added tokens with such names mark parts of a turn's content, which rows may write themselves."""

_IN_BRACKETS = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]|<<?/?[A-Z]+>>?")


def turn_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return the added tokens, other than special ones, with which the chat template starts or ends turns."""
    added = {str(token.content) for token in tokenizer.added_tokens_decoder.values() if not token.special}
    added = {name for name in added if not _OF_CONTENT.search(name)}
    if not added or not tokenizer.chat_template:
        return frozenset()
    around_turns = "\n".join(text for rendered in _renderings(tokenizer) for text in _around(rendered))
    return frozenset(name for name in added if name.strip() and name in around_turns)


def plain_turn_marks(tokenizer: PreTrainedTokenizerBase, names: frozenset[str]) -> re.Pattern[str] | None:
    """Return a pattern for plain-text turn marks such as `### Assistant:`; None if the template has none.

    `names` are the names of control tokens: a mark that contains one of them cannot be forged by plain text.
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
        except DataError:  # it may require a list of parts
            continue


def _around(rendered: str) -> Sequence[str]:
    """Return the texts between the contents of turns, and after the last one."""
    starts = [(rendered.find(content), content) for content in _PROBES]
    spans = [(start, start + len(content)) for start, content in starts if start >= 0]
    between = [rendered[end:start] for (_, end), (start, _) in pairwise(spans) if end <= start]
    return [*between, *(rendered[end:] for _, end in spans[-1:])]
