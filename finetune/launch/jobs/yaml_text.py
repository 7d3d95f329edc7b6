"""YAML with the same meaning in versions 1.1 and 1.2: `yes` and `010` stay strings, scripts keep their lines."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS = re.compile(r"y|n|yes|no|on|off|true|false|null", re.IGNORECASE)
"""Words that YAML 1.1 does not read as strings."""


def yaml_text(documents: Sequence[Mapping[str, Any]], *, comment: str) -> str:
    """Return the documents as one file that starts with the comment."""
    writer = YAML()
    writer.default_flow_style = False
    writer.width = 1 << 20
    writer.indent(mapping=2, sequence=4, offset=2)
    stream = io.StringIO()
    for number, document in enumerate(documents):
        stream.write("---\n" if number else "".join(f"# {line}\n" for line in comment.splitlines()))
        writer.dump(_styled(document), stream)
    return stream.getvalue()


def _styled(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_styled(str(key)): _styled(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_styled(item) for item in value]
    if not isinstance(value, str):
        return value
    if _PLAIN.fullmatch(value) and not _WORDS.fullmatch(value):
        return value
    lines = value.split("\n")
    is_script = value.endswith("\n") and len(lines) > 2 and not value.startswith((" ", "\n"))
    if is_script and all(line.isprintable() and line == line.rstrip() for line in lines):
        return LiteralScalarString(value)
    return DoubleQuotedScalarString(value)
