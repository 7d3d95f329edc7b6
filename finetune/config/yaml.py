"""Reads YAML 1.2 and records the line of every key.

Only plain values exist: text, whole numbers, decimal numbers, true/false, null, lists and mappings with text keys.
Dates are text. Nothing is expanded. Constructs that no job file needs are refused while reading, before they cost
time or memory. The limits are larger than any job needs, and small enough to check within seconds: reading takes about
30 microseconds per value, and the checks take a similar time.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.scanner import Scanner

from finetune.config.section import join_key
from finetune.errors import Problem

MAX_FILE_BYTES = 1 << 20
"""Size of a job file."""

MAX_VALUES = 25_000
"""Values and keys of a file or an override, aliases expanded: 20,000 names of classes are fine."""

MAX_RESOLVED_VALUES = 30_000
"""Values and keys of a `resolved.yaml`, which includes all defaults."""

MAX_DEPTH = 32
"""Nesting depth of lists and sections."""

MAX_TEXT_LENGTH = 4 << 20
"""Characters of all texts and numbers together, aliases expanded."""

MAX_KEY_LENGTH = 1_000
"""Characters of a dotted key."""

MAX_DIGITS = 100
"""Characters of a number."""

MAX_LISTED = 50
"""Maximum number of listed problems; the others are only counted."""

TOO_DEEP = f"lists and sections are nested deeper than {MAX_DEPTH} levels here. No key needs that: flatten them."
TOO_MANY_VALUES = f"there are more than {MAX_VALUES:,} keys and values up to here, aliases expanded. Shorten the lists."
TOO_MUCH_TEXT = (
    f"there are more than {MAX_TEXT_LENGTH:,} characters of text up to here, aliases expanded. Shorten the texts."
)
TOO_LARGE_NUMBER = f"the number has more than {MAX_DIGITS} digits. Write a smaller one."


def invalid_characters(text: str) -> str | None:
    """Return the problem of a text that contains a NUL or cannot be encoded as UTF-8; None if it has none."""
    match = _UNWRITABLE.search(text)
    if match is None:
        return None
    if match[0] == "\0":
        return "this text contains a NUL character. Remove it."
    return "this text contains an unpaired surrogate, which UTF-8 cannot encode. Remove it."


_UNWRITABLE = re.compile("[\0\ud800-\udfff]")


TAG = "tag:yaml.org,2002:"
TEXT_TAGS = frozenset(TAG + name for name in ("str", "timestamp", "merge", "value"))


@dataclass
class Document:
    """A YAML text as plain values, with the line of every dotted key (lists by index) and its problems."""

    values: Any = None
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


class LimitError(Exception):
    """Raised where the text exceeds a limit; has the problem with its line."""

    def __init__(self, message: str, *, line: int, key: str = "") -> None:
        super().__init__(message)
        self.problem = Problem(key, message, line=line)


class NodeReader:
    """Turns YAML nodes into values and records lines and problems in the document."""

    def __init__(self, reader: YAML, document: Document, *, max_values: int) -> None:
        self._max_values = max_values
        self._constructor = reader.constructor
        self._resolver = reader.resolver
        self._document = document
        self._open: list[Node] = []  # ancestors of the current node: an alias to one of them would be infinite
        self._num_values = 0  # aliases expanded
        self._text_length = 0

    def value(self, node: Node, *, key: str) -> Any:
        """Return the node's value; raises LimitError where expanded aliases exceed a limit."""
        self._count(node, key)
        if any(node is outer for outer in self._open):
            self._complain(node, key, "this alias contains itself. Write the values out.")
            return None
        if isinstance(node, ScalarNode):
            return self._scalar(node, key)
        if str(node.tag) not in (f"{TAG}seq", f"{TAG}map"):
            self._complain(node, key, _tag_error(node))
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
            message = f"the dotted key has {len(key):,} characters. At most {MAX_KEY_LENGTH:,} are allowed."
            raise LimitError(message, line=line, key=f"{key[:57]}...")

    def _sequence(self, node: SequenceNode, key: str) -> list[Any]:
        values = []
        for index, item in enumerate(node.value):
            inner_key = join_key(key, index)
            self._document.lines[inner_key] = item.start_mark.line + 1
            values.append(self.value(item, key=inner_key))
        return values

    def _mapping(self, node: Node, key: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name_node, item in node.value:
            if not isinstance(name_node, ScalarNode):
                self._complain(name_node, key, "a key must be text, not a list or a section.")
                continue
            name, line = str(name_node.value), name_node.start_mark.line + 1
            inner_key = join_key(key, name)
            # A plain whole number, such as a column's position, is taken as its text.
            is_position = (
                name_node.tag == f"{TAG}int" and re.fullmatch(r"0|[1-9][0-9]{0,8}", name_node.value) is not None
            )
            is_text = name_node.tag in TEXT_TAGS or (key != "" and is_position)
            fault = invalid_characters(name) if is_text else "a key must be text. Put it in quotes."
            if fault is not None:
                self._complain(name_node, inner_key, fault)
                continue
            if name in values:
                message = f"the key already exists on line {self._document.lines[inner_key]}. Remove one of them."
                self._document.problems.append(Problem(inner_key, message, line=line))
                continue
            self._document.lines[inner_key] = line
            values[name] = self.value(item, key=inner_key)
        return values

    def _scalar(self, node: ScalarNode, key: str) -> Any:
        is_plain = node.style is None
        if node.tag != self._resolver.resolve(ScalarNode, node.value, (is_plain, not is_plain)):
            self._complain(node, key, _tag_error(node))
            return None
        if node.tag in TEXT_TAGS:
            fault = NOT_EXPANDED if _VARIABLE.search(node.value) else invalid_characters(node.value)
            if fault is not None:
                self._complain(node, key, fault)
            return str(node.value).replace("$${", "${")
        kind = str(node.tag).removeprefix(TAG)
        if kind == "null":
            if node.value == "" and key:
                self._complain(node, key, EMPTY)
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
            self._complain(node, key, "this is too large for a number with 64 bits. Write a smaller one.")
        return number

    def _complain(self, node: Node, key: str, message: str) -> None:
        line = self._document.lines.get(key, node.start_mark.line + 1)
        self._document.problems.append(Problem(key, message, line=line))


def _tag_error(node: Node) -> str:
    return f"the tag `{str(node.tag).replace(TAG, '!!')[:40]}` is not allowed. Write a plain value."


EMPTY = "there is no value after the colon. Write a value, or `null` for none."
_VARIABLE = re.compile(r"(?<!\$)\$\{")
NOT_EXPANDED = (
    "environment variables are not expanded. Write the value, or pass it with `--set` and let the shell expand it. "
    "For the characters `${` themselves write `$${`."
)


_ADVICE = {
    "'\\t'": "Indent with spaces, not with tabs.",
    "mapping values are not allowed": "Put text that contains a colon in quotes.",
    "single document": "Write one document per file: remove the `---` line.",
}
_CHECK = "Check indentation, quotes and brackets on this line and the one above."
_MAX_COMPLAINT_CHARACTERS = 200  # characters: the parser quotes parts of the text


class _Scanner(Scanner):
    """A scanner that stops at brackets nested too deeply, because its time is quadratic in the depth."""

    def fetch_flow_collection_start(self, *arguments: Any, **named: Any) -> None:
        if len(self.flow_context) >= MAX_DEPTH:
            raise LimitError(TOO_DEEP, line=self.reader.line + 1)
        super().fetch_flow_collection_start(*arguments, **named)


class _Composer(Composer):
    """A composer that stops at values that are nested too deeply or too many, without reading the rest."""

    def __init__(self, loader: Any = None) -> None:
        super().__init__(loader)
        self.warn_double_anchors = False  # YAML allows an anchor to be defined again
        self._num_values = 0
        self._level = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._num_values += 1
        self._level += 1
        if self._level > MAX_DEPTH + 1 or self._num_values > MAX_RESOLVED_VALUES:
            message = TOO_DEEP if self._level > MAX_DEPTH + 1 else TOO_MANY_VALUES
            raise LimitError(message, line=self.parser.peek_event().start_mark.line + 1)
        node = super().compose_node(parent, index)
        self._level -= 1
        return node


def read_yaml(text: str, *, max_values: int = MAX_VALUES) -> Document:
    """Return the text's values and lines; errors are returned as problems, never raised."""
    document = Document()
    directive = re.search(r"^%YAML\s+(?!1\.2\b)", text, re.MULTILINE)
    if directive is not None:
        line = text.count("\n", 0, directive.start()) + 1
        document.problems.append(Problem("", "job files are read as YAML 1.2. Remove the %YAML line.", line=line))
        return document
    reader = YAML(typ="safe", pure=True)
    reader.Scanner, reader.Composer = _Scanner, _Composer
    try:
        root = reader.compose(text)
        if root is not None:
            document.values = NodeReader(reader, document, max_values=max_values).value(root, key="")
    except LimitError as error:
        document.problems.append(error.problem)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(part for part in (error.context, error.problem) if part)
        what = what if len(what) <= _MAX_COMPLAINT_CHARACTERS else f"{what[:_MAX_COMPLAINT_CHARACTERS]}..."
        advice = next((text for sign, text in _ADVICE.items() if sign in what), _CHECK)
        message = f"this is not YAML: {what}. {advice}"
        document.problems.append(Problem("", message, line=None if mark is None else mark.line + 1))
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        document.problems.append(
            Problem("", "the text contains a character that YAML does not allow. Remove it.", line=line)
        )
    except UnicodeEncodeError:
        document.problems.append(Problem("", invalid_characters(text) or "this text cannot be encoded as UTF-8."))
    return document
