"""Rendering: turns become the chat template's text, with the stretches that its generation markers enclose."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from finetune.data.formats.turns import Turn
from finetune.errors import DataError

Tools = Sequence[Mapping[str, Any]]
"""Tools that the assistant may call, as JSON schemas."""

_FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What running somebody's template over somebody's turns can raise."""


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
        texts, marked = render_jinja_template(
            # as apply_chat_template does: many templates write an absent value as the word None
            conversations=[[{key: part for key, part in turn.items() if part is not None} for turn in turns]],
            tools=tools,
            chat_template=template,
            add_generation_prompt=with_answer_cue,
            return_assistant_tokens_mask=has_markers(template),
            **tokenizer.special_tokens_map,
        )
    except _FAILURES as error:
        roles = ", ".join(str(turn["role"]) for turn in turns)
        raise DataError(f"the chat template refuses the conversation ({roles}): {error}") from error
    return Rendering(texts[0], tuple(marked[0]) if marked else ())


@lru_cache(maxsize=8)
def has_markers(template: str) -> bool:
    """Tell whether the template marks what the assistant says with `{% generation %}`."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
