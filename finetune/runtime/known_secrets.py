"""Secrets that are known by their value: those of the environment, and what a job file has under secret names."""

import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote, quote_plus

from finetune.runtime.secret_urls import REDACTED

SHORTEST_KNOWN = 8
"""Characters from which on a known value is looked for in any text: shorter ones are found in ordinary words."""

SECRET_VARIABLE = re.compile(
    r"(^|_)(API_?KEY|AUTH|AUTHORIZATION|BEARER|COOKIES?|CREDENTIALS?|JWT|KEYS?|PASS|PASSPHRASE|PASSWD|PASSWORD|PAT|PWD"
    r"|SAS|SECRETS?|SIG|SIGNATURE|TOKENS?)(_|$)",
    re.IGNORECASE,
)
_NO_SECRET_VARIABLE = re.compile(r"^(OLD)?PWD$|_(PATH|FILE|DIR|FOLDER|SOCK|HOME|URL|ENDPOINT|NAME|TYPE|TTL)$", re.I)
"""Names that speak of a secret and hold where one is kept; what they hold is not looked for elsewhere."""

_ESCAPE = re.compile("%[0-9A-F]{2}")
_ORDINARY = re.compile(r"\d{1,15}|(?=.{1,24}$)[a-z]+(?:[_ -][a-z]+)*")
"""Values found in texts that do not speak of them; under a secret name they are left out all the same."""


class KnownSecrets:
    """Values that are secrets, with the forms in which they appear in texts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_variables: frozenset[str] | None = None
        self._others: frozenset[str] = frozenset()
        self.forms: tuple[str, ...] = ()

    def look(self) -> None:
        """Take the values of the environment as it is now, in place of those before."""
        with self._lock:
            self._of_variables = frozenset(_secret_variables(os.environ))
            self._make_forms()

    def add(self, values: Iterable[str]) -> None:
        """Remember further values until this process ends."""
        more = frozenset(value for value in values if _is_looked_for(value))
        if not more <= self._others:
            with self._lock:
                self._others |= more
                self._make_forms()

    def leave_out(self, text: str) -> str:
        """Return the text without any of them."""
        if self._of_variables is None:
            self.look()
        for form in self.forms:
            if form in text:
                text = text.replace(form, REDACTED)
        return text

    def _make_forms(self) -> None:
        values = (self._of_variables or frozenset()) | self._others
        forms = {form for value in values for form in _forms(value)}
        self.forms = tuple(sorted(forms, key=lambda form: (-len(form), form)))  # a longer one may hold a shorter one


def _secret_variables(variables: Mapping[str, str]) -> Iterator[str]:
    for name, value in variables.items():
        if SECRET_VARIABLE.search(name) and not _NO_SECRET_VARIABLE.search(name) and _is_looked_for(value):
            yield value


def _is_looked_for(value: str) -> bool:
    """Tell whether a value is looked for in texts: no short one, no number or plain words, no place that exists."""
    if len(value) < SHORTEST_KNOWN or _ORDINARY.fullmatch(value) or REDACTED in value:
        return False
    return not (value.startswith(("/", "~", ".")) and _is_there(value))


def _is_there(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def _forms(value: str) -> Iterator[str]:
    yield value
    if not value.isalnum():
        for quoted in {
            quote(value, safe="", errors="replace"),
            quote(value, errors="replace"),
            quote_plus(value, errors="replace"),
        }:
            yield from (quoted, _ESCAPE.sub(lambda escape: escape[0].lower(), quoted))
        yield repr(value)[1:-1]
        yield value.replace("\\", "\\\\").replace('"', '\\"')  # as JSON has it
        yield from (line for line in value.splitlines() if _is_looked_for(line) and line != value)
