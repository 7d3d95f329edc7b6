"""What a chat template silently leaves out of a row: found by rendering the row without it."""

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from finetune.data.encoding.target_spans import TargetFinder
from finetune.data.templates.rendering import Tools, render
from finetune.data.turns import Turn
from finetune.errors import DataError

REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names that reasoning is given under."""


class Part(NamedTuple):
    """A kind of part that a row can have."""

    kind: str
    role: str = ""
    detail: str = ""


class DroppedContentCheck:
    """Looks at the first row that has a part of some kind; one is made for each chunk of rows, so it costs little."""

    def __init__(self, finder: TargetFinder) -> None:
        self._finder = finder
        self._seen: set[Part] = set()

    def check(self, turns: Sequence[Turn], tools: Tools | None) -> None:
        """Raise DataError naming the part of the row that the template drops, or does not write as it should."""
        unseen = [part for part in parts_of(turns, tools) if part not in self._seen]
        if not unseen:
            return
        self._seen.update(unseen)
        text = render(self._finder.tokenizer, turns, tools=tools).text
        for part in unseen:
            if self._is_same_without(part, turns, tools, text=text):
                raise DataError(f"the chat template ({self._finder.template}) drops {_NAMES[part.kind](part)}")
        _check_written(turns, text=text, template=self._finder.template)

    def _is_same_without(self, part: Part, turns: Sequence[Turn], tools: Tools | None, *, text: str) -> bool:
        less = None if part.kind == "tools" else tools
        try:
            return render(self._finder.tokenizer, without_part(part, turns), tools=less).text == text
        except DataError:  # it cannot do without
            return False


def parts_of(turns: Sequence[Turn], tools: Tools | None) -> Iterator[Part]:
    """Yield the kinds of parts that the row has."""
    if tools:
        yield Part("tools")
    for turn in turns:
        content = turn.get("content")
        if content and not (isinstance(content, str) and content.isspace()):
            yield Part("content", turn["role"], type(content).__name__)
        if turn.get("tool_calls"):
            yield Part("tool_calls", turn["role"], "with content" if content else "")
    if turns and any(turns[-1].get(name) for name in REASONING):  # templates leave earlier reasoning out by design
        yield Part("reasoning", turns[-1]["role"])


def without_part(part: Part, turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns of the part's role without the part; with another content, as some templates need one."""
    if part.kind == "tools":
        return list(turns)
    other = _ANOTHER if part.detail == "str" else [{"type": "text", "text": _ANOTHER}]
    absent: Turn = {"content": other} if part.kind == "content" else dict.fromkeys(_FIELDS[part.kind])
    return [{**turn, **absent} if turn["role"] == part.role else turn for turn in turns]


def _check_written(turns: Sequence[Turn], *, text: str, template: str) -> None:
    """Raise DataError where the template writes a structure as code, or text in quotes."""
    for number, turn in enumerate(turns, start=1):
        content = turn.get("content")
        if isinstance(content, list) and repr(content) in text:
            raise DataError(
                f"the chat template ({template}) writes the content of turn {number}, a list of parts, as Python code. "
                "Give it as text."
            )
        for arguments in _arguments_as_text(turn):
            if arguments not in text and json.dumps(arguments, ensure_ascii=False) in text:
                raise DataError(
                    f"the chat template ({template}) writes the arguments of the tool call in turn {number}, which are "
                    'text, in quotes. Give them as an object: {"city": "Oslo"}.'
                )


def _arguments_as_text(turn: Turn) -> Iterator[str]:
    for call in turn.get("tool_calls") or ():
        arguments = call.get("function", call).get("arguments")
        if isinstance(arguments, str) and '"' in arguments:
            yield arguments


_ANOTHER = "Xyzzy"
_FIELDS = {"tool_calls": ("tool_calls",), "reasoning": REASONING}
_OTHER = "Set data.chat_template to one that writes it, or leave it out of the rows."
_NAMES = {
    "tools": lambda part: f"the `tools` of the row: the model would not see them. {_OTHER}",
    "content": lambda part: (
        f"the content of `{part.role}` turns: the conversation is rendered in the same way whatever it is. "
        + ("It may want a list of parts: " if part.detail == "str" else "It may want text, not a list of parts: ")
        + ('[{"type": "text", "text": ...}].' if part.detail == "str" else '"content": "...".')
    ),
    "tool_calls": lambda part: f"`tool_calls` of {part.role} turns{f' {part.detail}' if part.detail else ''}. {_OTHER}",
    "reasoning": lambda part: f"the reasoning of the last turn. {_OTHER}",
}
