"""What a chat template can write: rows with roles that it does not know, or content that it drops, are refused."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from finetune.data.encoding.target_spans import REASONING, TargetFinder
from finetune.data.rows import Turn
from finetune.data.templates.rendering import Arguments, Tools, render_chat
from finetune.errors import DataError
from finetune.registry.turns import ROLES, STANDARD_ROLES, find_role


def with_known_roles(turns: Sequence[Turn], own: frozenset[str]) -> Sequence[Turn]:
    """Return the turns with roles of chat templates, or the template's `own` if it lacks the common one.

    Raises DataError naming a role that is unknown to both, and its turn.
    """
    if all(turn["role"] in STANDARD_ROLES for turn in turns):
        return turns
    known = []
    for number, turn in enumerate(turns, start=1):
        role, entry = turn["role"], find_role(turn["role"])
        is_own = role in own and (entry is None or entry.role not in own)
        if not is_own and entry is None:
            roles = ", ".join(f"`{role.name}`" for role in ROLES)
            raise DataError(
                f"turn {number} has the role `{role}`, which neither `finetune` nor the chat template knows. Known are "
                f"{roles}. Rename it in the rows, or with a `template`."
            )
        known.append(turn if is_own or entry is None else {**turn, "role": entry.role})
    return known


class Part(NamedTuple):
    """A kind of content that a row can have."""

    kind: str
    role: str = ""
    detail: str = ""


@dataclass
class DroppedContentCheck:
    """Checks the first row with each kind of part; one instance per chunk of rows, so the cost is low."""

    finder: TargetFinder
    seen: set[Part] = field(default_factory=set)

    def check(self, turns: Sequence[Turn], tools: Tools | None, arguments: Arguments | None = None) -> None:
        """Raise DataError naming the part of the row that the template drops or writes incorrectly."""
        unseen = [part for part in parts_of(turns, tools) if part not in self.seen]
        if not unseen:
            return
        self.seen.update(unseen)
        text = render_chat(self.finder.tokenizer, turns, tools=tools, arguments=arguments).text
        for part in unseen:
            less = None if part.kind == "tools" else tools
            others = list(turns)
            if part.kind != "tools":  # content is replaced, since some templates require it
                other = _ANOTHER if part.detail == "str" else [{"type": "text", "text": _ANOTHER}]
                absent: Turn = {"content": other} if part.kind == "content" else dict.fromkeys(_FIELDS[part.kind])
                others = [{**turn, **absent} if turn["role"] == part.role else turn for turn in turns]
            try:
                is_dropped = render_chat(self.finder.tokenizer, others, tools=less, arguments=arguments).text == text
            except DataError:  # the template requires the part
                is_dropped = False
            if is_dropped:
                what = _NAMES[part.kind].format(role=part.role, detail=part.detail)
                raise DataError(
                    f"the chat template ({self.finder.template}) drops {what} Set data.chat_template to one that "
                    "writes it, or change the rows."
                )
        _check_written(turns, text=text, template=self.finder.template)


def parts_of(turns: Sequence[Turn], tools: Tools | None) -> Iterator[Part]:
    """Yield the parts of the row."""
    if tools:
        yield Part("tools")
    for turn in turns:
        content = turn.get("content")
        if content and not (isinstance(content, str) and content.isspace()):
            yield Part("content", turn["role"], "texts" if len(_texts(content)) > 1 else type(content).__name__)
        if turn.get("tool_calls"):
            yield Part("tool_calls", turn["role"], " with content" if content else "")
    if turns and any(turns[-1].get(name) for name in REASONING):  # templates omit earlier reasoning by design
        yield Part("reasoning", turns[-1]["role"])


def _check_written(turns: Sequence[Turn], *, text: str, template: str) -> None:
    """Raise DataError if the template writes a structure as Python code, or text in quotes."""
    for number, turn in enumerate(turns, start=1):
        content = turn.get("content")
        if isinstance(content, list) and repr(content) in text:
            raise DataError(
                f"the chat template ({template}) writes the content of turn {number}, a list of parts, as Python code. "
                "Give it as text."
            )
        texts = _texts(content)
        if len(texts) > 1 and (missing := [part for part in texts if part.strip() not in text]):
            raise DataError(f"the chat template ({template}) drops {missing[0]!r}, one of the texts of turn {number}.")
        for call in turn.get("tool_calls") or ():
            arguments = call.get("function", call).get("arguments")
            has_quotes = isinstance(arguments, str) and '"' in arguments
            if has_quotes and arguments not in text and json.dumps(arguments, ensure_ascii=False) in text:
                raise DataError(
                    f"the chat template ({template}) writes the arguments of the tool call in turn {number}, which are "
                    'text, in quotes. Give them as an object: {"city": "Oslo"}.'
                )


def _texts(content: Any) -> list[str]:
    return [part["text"] for part in content if "text" in part] if isinstance(content, list) else []


_ANOTHER = "Xyzzy"
_FIELDS = {"tool_calls": ("tool_calls",), "reasoning": REASONING}
_NAMES = {
    "tools": "the `tools` of the row: the model would not see them.",
    "content": "the content of `{role}` turns: the rendered conversation does not depend on it. It may lack this role, "
    'or require text, "content": "...", or a list of parts, [{{"type": "text", "text": ...}}].',
    "tool_calls": "`tool_calls` of {role} turns{detail}.",
    "reasoning": "the reasoning of the last turn.",
}
