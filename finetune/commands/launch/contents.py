"""Refuses secrets in job files, which other users can read, and invisible characters."""

import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.runtime.text.redact import is_secret_variable, redact_foreign, redacted_command
from finetune.runtime.text.terminal import escape_controls

_IMAGE_USER = re.compile(r"(?:[a-z]+:(?://)?)?[^/@\s]+:[^/@\s]+@(?!sha256:)")
_READ_BY_OTHERS = "this is a secret, and everyone who can read the job file could read it"
INSIST = "Or pass --allow-secrets and --output FILE: only you can read that file (mode 0600)."
_NAMES_OF_SECRETS = ("secret", "env_file")
"""Options that name secrets without their values."""


def check_options(records: Iterable[Any], *, advice: str, allows_secrets: bool) -> None:
    """Raise UserError for an option with a secret or an invisible character; `advice` says how to pass secrets."""
    typed = [(field.name, getattr(record, field.name)) for record in records for field in fields(record)]
    texts = [(name, text) for name, value in typed for text in (value if isinstance(value, tuple) else (value,))]
    for name, text in ((name, str(text)) for name, text in texts if isinstance(text, str | Path)):
        option = "--set" if name == "override" else f"--{name.replace('_', '-')}"
        if escape_controls(text) != text:
            raise UserError(
                f"{option} {escape_controls(text)}: it has a control character or an invisible one, shown here as its "
                "escape, which a job file cannot contain. Remove it."
            )
        if allows_secrets or name in _NAMES_OF_SECRETS:
            continue
        variable, _, value = text.partition("=")
        user = _IMAGE_USER.match(text) if name in ("image", "container") else None
        if name == "env" and is_secret_variable(variable, value):
            shown = f"{variable}=[redacted]"
        else:
            shown = f"[redacted]@{text[user.end() :]}" if user is not None else redacted_command([text])[0]
        if shown != text:
            raise UserError(f"{option} {shown}: {_READ_BY_OTHERS}. {advice}")


def check_text(
    text: str, *, source: str, advice: str, allows_secrets: bool, redact: Callable[[str], str] = redact_foreign
) -> None:
    """Raise UserError where a text of a job file, named `source`, has a secret or an invisible character."""
    visible = escape_controls(text)
    cleaned = visible if allows_secrets else redact(visible)
    lines = zip(text.split("\n"), visible.split("\n"), cleaned.split("\n"), strict=False)  # a key has several lines
    for number, (line, seen, shown) in enumerate(lines, start=1):
        if seen != line:
            raise UserError(f"{source}, line {number}: it has a control character or an invisible one: {shown.strip()}")
        if shown != line:
            raise UserError(f"{source}, line {number}: {_READ_BY_OTHERS}: {shown.strip()}. {advice}")
