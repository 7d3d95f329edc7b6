"""Writes the job: our keys, each with the line that it is from, below comments on differences and missing parts."""

import re
import textwrap
from collections.abc import Iterator
from typing import Any

from finetune.migration.draft import Draft, Entry, Fate, nested
from finetune.runtime.text.redact import redacted_config
from finetune.runtime.text.terminal import escape_controls, format_json

_SECTIONS = ("run", "model", "data", "task", "train", "evaluate", "checkpoint", "report", "export")
_PLAIN = re.compile(r"[A-Za-z][\w./-]*")
_NOT_PLAIN = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
_HEADS: tuple[tuple[Fate, str], ...] = (
    ("not_possible", "Not possible here, and what to do instead:"),
    ("unknown", "Unknown keys, which were not read:"),
)
_WIDTH = 116
_SHOWN = 60


def job_text(draft: Draft, *, title: str) -> str:
    """Return the text of the job file."""
    sections = nested(draft.entries)
    lines = [*_header(draft, title)]
    for name in (*_SECTIONS, *(name for name in sections if name not in _SECTIONS)):
        if name in sections:
            lines += ["", *_lines(draft, name, sections[name], indent="")]
    return escape_controls("\n".join(lines) + "\n")


def source_of_key(draft: Draft, key: str) -> str:
    """Return `line 12: micro_batch_size: 2` for a key of the peer's file, shortened and without secrets."""
    leaf = draft.file.leaves[key]
    shown = format_json(redacted_config(leaf.value, name=key.rpartition(".")[2]), default=str)
    shown = shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 3]}..."
    return f"{'' if leaf.line is None else f'line {leaf.line}: '}{key}: {shown}"


def _header(draft: Draft, title: str) -> Iterator[str]:
    yield from _comment(f"Made by `finetune init --from {draft.file.path.name}` from a config of {title}.")
    if draft.notes:
        yield from ("#", "# What meant something else there:")
        for note in draft.notes:
            yield from _comment(note, bullet="- ")
    for fate, head in _HEADS:
        if keys := draft.keys_of(fate):
            yield from ("#", f"# {head}")
            for key in keys:
                yield from _comment(f"{source_of_key(draft, key)} - {draft.outcomes[key].text}", bullet="- ")
    reasons = dict.fromkeys(draft.outcomes[key].text for key in draft.keys_of("not_needed"))
    if reasons:
        yield from ("#", "# Not needed here:")
    for reason in reasons:
        keys = [key for key in draft.keys_of("not_needed") if draft.outcomes[key].text == reason]
        yield from _comment(f"{reason}: {'; '.join(source_of_key(draft, key) for key in keys)}", bullet="- ")
    mapped = [key for key in draft.keys_of("mapped") if " " in draft.outcomes[key].text]
    if mapped:
        yield from ("#", "# In other files, or sections without keys of their own:")
        for key in mapped:
            yield from _comment(f"{source_of_key(draft, key)} - {draft.outcomes[key].text}", bullet="- ")


def _comment(text: str, *, bullet: str = "") -> Iterator[str]:
    text = " ".join(text.split())
    yield from textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"# {bullet}",
        subsequent_indent=f"# {' ' * len(bullet)}",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _lines(draft: Draft, name: str, value: Any, *, indent: str, dash: str = "") -> Iterator[str]:
    if isinstance(value, Entry):
        yield f"{indent}{dash}{name}: {yaml_value(value.value)}{_origin(draft, value)}"
        return
    yield f"{indent}{dash}{name}:"
    if value and all(key.isdecimal() for key in value):
        for item in value.values():
            inner = [line for key, entry in item.items() for line in _lines(draft, key, entry, indent="")]
            yield f"{indent}  - {inner[0]}"
            yield from (f"{indent}    {line}" for line in inner[1:])
        return
    for key, entry in sorted(
        value.items(), key=lambda item: (item[0] not in ("name", "path"), isinstance(item[1], dict))
    ):
        yield from _lines(draft, key, entry, indent=f"{indent}  ")


def _origin(draft: Draft, entry: Entry) -> str:
    sources = [source_of_key(draft, key) for key in entry.leaves]
    parts = [f"from {'; '.join(sources[:4])}{'; ...' if len(sources) > 4 else ''}"] if sources else []
    parts += [entry.comment] if entry.comment else []
    return f"  # {' - '.join(parts)}".replace("\n", " ") if parts else ""


def yaml_value(value: Any) -> str:
    """Return a value as YAML on one line: JSON, with quotes only where they are needed."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{yaml_value(name)}: {yaml_value(inner)}' for name, inner in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(yaml_value(item) for item in value)}]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _NOT_PLAIN:
        return value
    return format_json(value)
