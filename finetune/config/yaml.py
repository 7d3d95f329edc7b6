"""Reads YAML 1.2 and remembers on which line every key stands.

Only plain values exist: text, whole numbers, decimal numbers, true/false, null, lists and mappings with text keys.
Dates are text. Nothing is expanded. What no job file needs is refused while it is read, before it costs time or
memory: see `config/limits.py`.
"""

import re
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.scanner import Scanner

from finetune.config.limits import MAX_DEPTH, MAX_RESOLVED_VALUES, MAX_VALUES, TOO_DEEP, TOO_MANY_VALUES, unwritable
from finetune.config.values import Document, LimitError, Walk
from finetune.errors import Problem

_LONGEST_COMPLAINT = 200  # characters: the parser quotes whole words of the text


class _Scanner(Scanner):
    """Ends at a bracket too deep: looking ahead for its end takes time that grows with the square of the depth."""

    def fetch_flow_collection_start(self, *arguments: Any, **named: Any) -> None:
        if len(self.flow_context) >= MAX_DEPTH:
            raise LimitError(TOO_DEEP, line=self.reader.line + 1)
        super().fetch_flow_collection_start(*arguments, **named)


class _Composer(Composer):
    """Ends where values are nested too deep, or are too many, before the rest is read."""

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
    """Return the text's values and lines; whatever is wrong with it is among its problems, never raised."""
    document = Document()
    directive = re.search(r"^%YAML\s+(?!1\.2\b)", text, re.MULTILINE)
    if directive is not None:
        line = text.count("\n", 0, directive.start()) + 1
        document.problems.append(Problem("", "this is read as YAML 1.2. Remove the %YAML line.", line=line))
        return document
    reader = YAML(typ="safe", pure=True)
    reader.Scanner, reader.Composer = _Scanner, _Composer
    try:
        root = reader.compose(text)
        if root is not None:
            document.values = Walk(reader, document, max_values=max_values).value(root, key="")
    except LimitError as error:
        document.problems.append(error.problem)
    except MarkedYAMLError as error:
        document.problems.append(_syntax_problem(error))
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        document.problems.append(Problem("", "there is a character that YAML does not allow. Remove it.", line=line))
    except UnicodeEncodeError:
        document.problems.append(Problem("", unwritable(text) or "this is not text that UTF-8 can hold."))
    return document


def _syntax_problem(error: MarkedYAMLError) -> Problem:
    """Return the parser's complaint in one sentence, with the advice that most often mends it."""
    mark = error.problem_mark or error.context_mark
    line = None if mark is None else mark.line + 1
    what = " ".join(part for part in (error.context, error.problem) if part)
    what = what if len(what) <= _LONGEST_COMPLAINT else f"{what[:_LONGEST_COMPLAINT]}..."
    if "'\\t'" in what:
        advice = "Indent with spaces, not with tabs."
    elif "mapping values are not allowed" in what:
        advice = "Put text that holds a colon in quotes."
    elif "single document" in what:
        advice = "Write one document per file: remove the `---` line."
    else:
        advice = "Check indentation, quotes and brackets on this line and the one above."
    return Problem("", f"this is not YAML: {what}. {advice}", line=line)
