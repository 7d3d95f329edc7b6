"""Rendering: turns become the chat template's text, with the stretches that its generation markers enclose."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from finetune.data.formats.turns import Turn
from finetune.data.templates.chat import render_chat
from finetune.data.templates.limited import TemplateRefused, limited
from finetune.data.templates.tame import is_tame
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
    with_answer_cue: bool = False,
) -> Rendering:
    """Return the turns as `tokenizer.apply_chat_template` renders them; with the cue, as a prompt to be answered.

    Raises DataError with the template's own words when it refuses the turns.
    """
    try:
        template = str(tokenizer.get_chat_template(tools=tools))
        arguments = {
            # as apply_chat_template does: many templates write an absent value as the word None
            "conversations": [[{key: part for key, part in turn.items() if part is not None} for turn in turns]],
            "tools": tools,
            "chat_template": template,
            "add_generation_prompt": with_answer_cue,
            "return_assistant_tokens_mask": has_markers(template),
            **tokenizer.special_tokens_map,
        }
        name = file_of_template(tokenizer)
        if name is None and is_tame(template):
            text, marked = render_chat(arguments)
        else:
            text, marked = limited(render_chat, arguments, name=name or "of the model", template=template)
    except (*_FAILURES, TemplateRefused) as error:
        roles = ", ".join(str(turn["role"]) for turn in turns)
        which = f" ({name})" if (name := file_of_template(tokenizer)) else ""
        raise DataError(f"the chat template{which} refuses the conversation ({roles}): {error}") from error
    return Rendering(text, tuple((start, end) for start, end in marked))


def file_of_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the file that the job names as chat template; None for one of ours, and for the tokenizer's own."""
    name: str | None = getattr(tokenizer, _FILE, None)
    return name


def set_template_file(tokenizer: PreTrainedTokenizerBase, name: str | None) -> None:
    """Keep in mind where the tokenizer's chat template comes from; it goes with the tokenizer to other processes."""
    setattr(tokenizer, _FILE, name)


@lru_cache(maxsize=8)
def has_markers(template: str) -> bool:
    """Tell whether the template marks what the assistant says with `{% generation %}`."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
