"""Reads YAML 1.2 and remembers on which line every key stands.

Only plain values exist: text, whole numbers, decimal numbers, true/false, null, lists and mappings with text keys.
Dates are text. Nothing is expanded.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from finetune.config.source import joined
from finetune.errors import Problem

TAG = "tag:yaml.org,2002:"
TEXT_TAGS = frozenset(TAG + name for name in ("str", "timestamp", "merge", "value"))


@dataclass
class Document:
    """A YAML text as plain values, the line of every dotted key (lists by index) and its faults."""

    values: Any = None
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_yaml(text: str) -> Document:
    """Return the text's values and lines; whatever is wrong with it is among its problems, never raised."""
    document = Document()
    directive = re.search(r"^%YAML\s+(?!1\.2\b)", text, re.MULTILINE)
    if directive is not None:
        line = text.count("\n", 0, directive.start()) + 1
        document.problems.append(Problem("", "this is read as YAML 1.2. Remove the %YAML line.", line=line))
        return document
    reader = YAML(typ="safe", pure=True)
    try:
        root = reader.compose(text)
    except MarkedYAMLError as error:
        document.problems.append(_syntax_problem(error))
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        document.problems.append(Problem("", "there is a character that YAML does not allow. Remove it.", line=line))
    else:
        if root is not None:
            document.values = _Walk(reader, document).value(root, key="")
    return document


def _syntax_problem(error: MarkedYAMLError) -> Problem:
    """Return the parser's complaint in one sentence, with the advice that most often mends it."""
    mark = error.problem_mark or error.context_mark
    line = None if mark is None else mark.line + 1
    what = " ".join(part for part in (error.context, error.problem) if part)
    if "'\\t'" in what:
        advice = "Indent with spaces, not with tabs."
    elif "mapping values are not allowed" in what:
        advice = "Put text that holds a colon in quotes."
    elif "single document" in what:
        advice = "Write one document per file: remove the `---` line."
    else:
        advice = "Check indentation, quotes and brackets on this line and the one above."
    return Problem("", f"this is not YAML: {what}. {advice}", line=line)


class _Walk:
    """Turns nodes into values, writing lines and problems into the document on the way."""

    def __init__(self, reader: YAML, document: Document) -> None:
        self._constructor = reader.constructor
        self._document = document
        self._open: list[Node] = []  # the nodes around the present one: an alias to one of them never ends

    def value(self, node: Node, *, key: str) -> Any:
        """Return the node's value."""
        if any(node is outer for outer in self._open):
            self._complain(node, key, "this alias contains itself. Write the values out.")
            return None
        if isinstance(node, ScalarNode):
            return self._scalar(node, key)
        self._open.append(node)
        try:
            if isinstance(node, SequenceNode):
                return self._sequence(node, key)
            return self._mapping(node, key)
        finally:
            self._open.pop()

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
            if not isinstance(name_node, ScalarNode) or name_node.tag not in TEXT_TAGS:
                self._complain(name_node, joined(key, str(name_node.value)), "a key is text. Put it in quotes.")
                continue
            name, line = str(name_node.value), name_node.start_mark.line + 1
            place = joined(key, name)
            if name in values:
                message = f"the key is on line {self._document.lines[place]} already. Remove one of them."
                self._document.problems.append(Problem(place, message, line=line))
                continue
            self._document.lines[place] = line
            values[name] = self.value(item, key=place)
        return values

    def _scalar(self, node: ScalarNode, key: str) -> Any:
        if node.tag in TEXT_TAGS:
            if "${" in node.value:
                self._complain(node, key, NOT_EXPANDED)
            return str(node.value)
        if node.tag == TAG + "null":
            if node.value == "" and key:
                self._complain(node, key, "nothing is written after the colon. Write a value, or `null` for none.")
            return None
        if node.tag == TAG + "bool":
            return node.value.lower() == "true"
        if node.tag == TAG + "int":
            return int(self._constructor.construct_yaml_int(node))
        if node.tag == TAG + "float":
            return float(self._constructor.construct_yaml_float(node))
        self._complain(node, key, f"the tag `{str(node.tag).replace(TAG, '!!')}` is not allowed. Write a plain value.")
        return None

    def _complain(self, node: Node, key: str, message: str) -> None:
        line = self._document.lines.get(key, node.start_mark.line + 1)
        self._document.problems.append(Problem(key, message, line=line))


NOT_EXPANDED = (
    "environment variables are not expanded. Write the value, or pass it with `--set` and let the shell expand it."
)
