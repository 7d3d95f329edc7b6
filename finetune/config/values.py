"""From the nodes of a YAML text to plain values, with the line of every key and everything that is wrong with them."""

from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from finetune.config.limits import (
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_KEY_LENGTH,
    MAX_TEXT_LENGTH,
    TOO_DEEP,
    TOO_LARGE_NUMBER,
    TOO_MANY_VALUES,
    TOO_MUCH_TEXT,
    unwritable,
)
from finetune.config.source import joined
from finetune.config.wording import shortened
from finetune.errors import Problem

TAG = "tag:yaml.org,2002:"
TEXT_TAGS = frozenset(TAG + name for name in ("str", "timestamp", "merge", "value"))
SCALARS = {"int": "a whole number", "float": "a number", "bool": "`true` or `false`", "null": "`null`"}
"""Kinds of single values beside text, and how they are called."""


@dataclass
class Document:
    """A YAML text as plain values, the line of every dotted key (lists by index) and its faults."""

    values: Any = None
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


class LimitError(Exception):
    """The text is larger than any job; at its place it says what to do."""

    def __init__(self, message: str, *, line: int, key: str = "") -> None:
        super().__init__(message)
        self.problem = Problem(key, message, line=line)


class Walk:
    """Turns nodes into values, writing lines and problems into the document on the way."""

    def __init__(self, reader: YAML, document: Document, *, max_values: int) -> None:
        self._max_values = max_values
        self._constructor = reader.constructor
        self._resolver = reader.resolver
        self._document = document
        self._open: list[Node] = []  # the nodes around the present one: an alias to one of them never ends
        self._num_values = 0  # aliases expanded
        self._text_length = 0

    def value(self, node: Node, *, key: str) -> Any:
        """Return the node's value; raises LimitError where aliases make too much of the text."""
        self._count(node, key)
        if any(node is outer for outer in self._open):
            self._complain(node, key, "this alias contains itself. Write the values out.")
            return None
        if isinstance(node, ScalarNode):
            return self._scalar(node, key)
        if str(node.tag) not in (f"{TAG}seq", f"{TAG}map"):
            self._complain(node, key, _no_tag(node))
            return None
        self._open.append(node)
        try:
            if isinstance(node, SequenceNode):
                return self._sequence(node, key)
            return self._mapping(node, key)
        finally:
            self._open.pop()

    def _count(self, node: Node, key: str) -> None:
        line = node.start_mark.line + 1
        self._num_values += 1 + (len(node.value) if isinstance(node, MappingNode) else 0)
        self._text_length += len(node.value) if isinstance(node, ScalarNode) else 0
        if len(self._open) >= MAX_DEPTH:
            raise LimitError(TOO_DEEP, line=line)
        if self._num_values > self._max_values:
            raise LimitError(TOO_MANY_VALUES, line=line)
        if self._text_length > MAX_TEXT_LENGTH:
            raise LimitError(TOO_MUCH_TEXT, line=line)
        if len(key) > MAX_KEY_LENGTH:
            message = f"the key has {len(key):,} characters, with the keys around it. Write at most {MAX_KEY_LENGTH:,}."
            raise LimitError(message, line=line, key=f"{key[:57]}...")

    def _sequence(self, node: SequenceNode, key: str) -> list[Any]:
        values = []
        for index, item in enumerate(node.value):
            place = joined(key, index)
            self._document.lines[place] = item.start_mark.line + 1
            values.append(self.value(item, key=place))
        return values

    def _mapping(self, node: Node, key: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name_node, item in node.value:
            if not isinstance(name_node, ScalarNode):
                self._complain(name_node, key, "a key is text, not a list or a section.")
                continue
            name, line = str(name_node.value), name_node.start_mark.line + 1
            place = joined(key, name)
            fault = "a key is text. Put it in quotes." if name_node.tag not in TEXT_TAGS else unwritable(name)
            if fault is not None:
                self._complain(name_node, place, fault)
                continue
            if name in values:
                message = f"the key is on line {self._document.lines[place]} already. Remove one of them."
                self._document.problems.append(Problem(place, message, line=line))
                continue
            self._document.lines[place] = line
            values[name] = self.value(item, key=place)
        return values

    def _scalar(self, node: ScalarNode, key: str) -> Any:
        if node.tag in TEXT_TAGS:
            fault = NOT_EXPANDED if "${" in node.value else unwritable(node.value)
            if fault is not None:
                self._complain(node, key, fault)
            return str(node.value)
        kind = str(node.tag).removeprefix(TAG)
        if kind not in SCALARS:
            self._complain(node, key, _no_tag(node))
            return None
        try:
            return self._plain(node, kind, key)
        except (ValueError, IndexError):
            text = shortened(node.value)
            self._complain(
                node, key, f"`{text}` is not {SCALARS[kind]}, as the tag `!!{kind}` says. Leave the tag out."
            )
            return None

    def _plain(self, node: ScalarNode, kind: str, key: str) -> Any:
        """Return what is neither text, list nor section; raises ValueError where the tag is written and is wrong."""
        resolved = str(self._resolver.resolve(ScalarNode, node.value, (True, False))).removeprefix(TAG)
        if resolved != kind and (kind, resolved) != ("float", "int"):
            raise ValueError
        if kind == "null":
            if node.value == "" and key:
                self._complain(node, key, "nothing is written after the colon. Write a value, or `null` for none.")
            return None
        if kind == "bool":
            return node.value.lower() == "true"
        if len(node.value) > MAX_DIGITS:
            self._complain(node, key, TOO_LARGE_NUMBER)
            return None
        if kind == "int":
            return int(self._constructor.construct_yaml_int(node))
        number = float(self._constructor.construct_yaml_float(node))
        if number in (float("inf"), float("-inf")) and "inf" not in node.value.lower():
            self._complain(
                node, key, f"{shortened(node.value)} is too large for a number with 64 bits. Write a smaller one."
            )
        return number

    def _complain(self, node: Node, key: str, message: str) -> None:
        line = self._document.lines.get(key, node.start_mark.line + 1)
        self._document.problems.append(Problem(key, message, line=line))


def _no_tag(node: Node) -> str:
    return f"the tag `{str(node.tag).replace(TAG, '!!')[:40]}` is not allowed. Write a plain value."


NOT_EXPANDED = (
    "environment variables are not expanded. Write the value, or pass it with `--set` and let the shell expand it."
)
