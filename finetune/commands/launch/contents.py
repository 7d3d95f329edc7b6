"""What a job file may hold: no secrets, since others read it, and no characters that nobody sees."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.runtime.text.redact import is_secret_variable, redacted_command, redacted_text
from finetune.runtime.text.terminal import escape_controls

_IMAGE_USER = re.compile(r"(?:[a-z]+:(?://)?)?[^/@\s]+:[^/@\s]+@(?!sha256:)")
_READ_BY_OTHERS = "this is a secret, and everyone who can read the job file would read it"
INSIST = "Or insist with --allow-secrets and --output FILE: only you can read that file (mode 0600)."
_NAMES_OF_SECRETS = ("secret", "env_file")
"""Options that say where secrets are, and hold none."""


def check_options(records: Iterable[Any], *, advice: str, allows_secrets: bool) -> None:
    """Raise UserError for an option in one of the records that no job file may hold; `advice`: how secrets arrive."""
    for name, text in _typed_texts(records):
        option = "--set" if name == "override" else f"--{name.replace('_', '-')}"
        if escape_controls(text) != text:
            raise UserError(
                f"{option} {escape_controls(text)}: it has a control character or an invisible one, shown here as its "
                "escape, which a job file cannot hold. Write or rename it without."
            )
        if allows_secrets or name in _NAMES_OF_SECRETS or not (shown := _without_secret(name, text)):
            continue
        raise UserError(f"{option} {shown}: {_READ_BY_OTHERS}. {advice}")


def check_text(
    text: str, *, what: str, advice: str, allows_secrets: bool, redact: Callable[[str], str] = redacted_text
) -> None:
    """Raise UserError where a text that goes into a job file, or is one, holds what `check_options` looks for."""
    visible = escape_controls(text)
    cleaned = visible if allows_secrets else redact(visible)
    lines = zip(text.split("\n"), visible.split("\n"), cleaned.split("\n"), strict=False)  # a key has several lines
    for number, (line, seen, shown) in enumerate(lines, start=1):
        if seen != line:
            raise UserError(f"{what}, line {number}: it has a control character or an invisible one: {shown.strip()}")
        if shown != line:
            raise UserError(f"{what}, line {number}: {_READ_BY_OTHERS}: {shown.strip()}. {advice}")


def _typed_texts(records: Iterable[Any]) -> Iterator[tuple[str, str]]:
    for record in records:
        for field in fields(record):
            value = getattr(record, field.name)
            for text in value if isinstance(value, tuple) else (value,):
                if isinstance(text, str | Path):
                    yield field.name, str(text)


def _without_secret(name: str, text: str) -> str:
    """Return the option's value without its secret; empty where there is none."""
    variable, _, value = text.partition("=")
    if name == "env" and is_secret_variable(variable, value):
        return f"{variable}=[redacted]"
    user = _IMAGE_USER.match(text) if name in ("image", "container") else None
    if user is not None:
        return f"[redacted]@{text[user.end() :]}"
    shown = redacted_command([text])[0]
    return shown if shown != text else ""
