"""Removes secrets from everything that is written down or printed: the one place that knows what a secret looks like.

A value is a secret by the name of its key, by its shape, by its place in a URL, or because it is known: the values of
environment variables and job keys with secret names are removed wherever they appear. Imports no torch.
"""

import functools
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

from finetune.runtime.text.secret_urls import REDACTED, redacted_urls, secrets_in_urls, unsigned_urls

MIN_KNOWN_LENGTH = 8
"""The length from which a known value is searched for in any text: shorter ones occur in ordinary words."""

SECRET_VARIABLE = re.compile(
    r"(^|_)(API_?KEY|AUTH|AUTHORIZATION|BEARER|COOKIES?|CREDENTIALS?|JWT|KEYS?|PASS|PASSPHRASE|PASSWD|PASSWORD|PAT|PWD"
    r"|SAS|SECRETS?|SIG|SIGNATURE|TOKENS?)(_|$)",
    re.IGNORECASE,
)
_NO_SECRET_VARIABLE = re.compile(r"^(OLD)?PWD$|_(PATH|FILE|DIR|FOLDER|SOCK|HOME|URL|ENDPOINT|NAME|TYPE|TTL)$", re.I)
"""Names that mention a secret but hold its location; their values are not searched for elsewhere."""

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
        more = frozenset(value for value in values if _is_searched_for(value))
        if not more <= self._others:
            with self._lock:
                self._others |= more
                self._make_forms()

    def redact(self, text: str) -> str:
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
        if SECRET_VARIABLE.search(name) and not _NO_SECRET_VARIABLE.search(name) and _is_searched_for(value):
            yield value


def _is_searched_for(value: str) -> bool:
    """Return whether texts are searched for a value: not if it is short, a number, plain words or an existing path."""
    if len(value) < MIN_KNOWN_LENGTH or _ORDINARY.fullmatch(value) or REDACTED in value:
        return False
    return not (value.startswith(("/", "~", ".")) and _path_exists(value))


def _path_exists(path: str) -> bool:
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
        yield from (line for line in value.splitlines() if _is_searched_for(line) and line != value)


_SECRET_WORD = (
    r"(?:\w+[_-])?(?:password|passwd|passphrase|secrets?|credentials?|jwt)(?:[_-]\w+)?"
    r"|(?:\w+[_-])?(?:api|access|private|secret|auth|signing|encryption|account|shared|storage)[_-]?keys?(?:[_-]id)?"
    r"|(?:\w+[_-])?(?:auth|access|api|hf|hub|refresh|session|security|wandb|github|gitlab|secret|private|bearer)"
    r"[_-]?tokens?"
    r"|token|authorization|bearer|sig|signature"
)
_SECRET_NAME = re.compile(rf"^(?:{_SECRET_WORD})$", re.IGNORECASE)
_ASSIGNED = re.compile(
    r"(?<![A-Za-z0-9])(?P<name>[A-Za-z][\w-]{1,63})(?P<between>[\"']?\s?=\s?|%3D|[\"']\s?:\s?)"
    r"(?P<value>\"[^\"\n]*\"|'[^'\n]*'|[^\s,;&\"'`)\]}]+)",
    re.IGNORECASE,
)
_WORDS = ("pass", "secret", "credential", "jwt", "key", "token", "authorization", "bearer", "sig")
"""One of them is in every name of a secret."""

_YAML_LINE = re.compile(
    rf"^(?P<head>[ \t]*(?:-[ \t]+)?[\"']?(?:{_SECRET_WORD})[\"']?[ \t]*:[ \t]+)(?P<value>[^\s#{{\[&*|>][^\n]*?)"
    r"(?P<end>[ \t]*(?:[ \t]#[^\n]*)?)$",
    re.IGNORECASE | re.MULTILINE,
)
_FLOW = re.compile(
    rf"(?P<head>[{{,\[][ \t]*[\"']?(?:{_SECRET_WORD})[\"']?[ \t]*:[ \t]+)(?P<value>\"[^\"\n]*\"|'[^'\n]*'|[^,}}\]\n]+)",
    re.IGNORECASE,
)
_NO_VALUE = frozenset({"", "none", "null", "true", "false", "0", "1", "...", REDACTED})

_IN_YAML = rf"\g<head>'{REDACTED}'"

_START = r"(?:(?<![A-Za-z0-9])|(?<=%[0-9A-Fa-f][0-9A-Fa-f]))"
_SECRET_SHAPE = re.compile(
    rf"{_START}(?:"
    r"(?:hf_|api_org_|npm_|gh[opusr]_|sk-|wandb_v1_)[A-Za-z0-9]{16,}[A-Za-z0-9_-]*"
    r"|(?:sk-(?:proj|ant|or|svcacct|live|test)|[sr]k_(?:live|test)|github_pat|glpat|xox[abeprs]|dop_v1|pypi)[_-]"
    r"[A-Za-z0-9_-]{12,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{20,}|SG\.[\w-]{16,99}\.[\w-]{16,}"
    r"|eyJ[\w-]{10,500}\.[\w-]{10,}(?:\.[\w-]+)?"
    r")|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_BEGINNINGS = (
    *("hf_", "api_org_", "npm_", "ghp_", "gho_", "ghs_", "ghu_", "ghr_", "sk-", "sk_", "rk_", "wandb_v1_"),
    *("github_pat", "glpat", "xox", "dop_v1", "pypi", "AKIA", "ASIA", "AIza", "ya29.", "SG.", "eyJ", "PRIVATE KEY"),
)
"""One of them is in every such shape: most texts have none, and are not searched further."""

_HEADER = re.compile(
    r"\b(?P<scheme>Bearer|Basic)(?P<between>\s{1,4}|%20)(?=\S*(?:[\d=]|[a-z][A-Z]))(?P<value>[A-Za-z0-9._~+/=-]{12,})"
)
_OPAQUE = re.compile(r"(?<![\w/.+-])(?=[\w+-]*[a-z])(?=[\w+-]*[A-Z])(?=[\w+-]*\d)[\w+-]{24,}={0,2}(?![\w/.])")
"""A word that is unlikely to be written by hand; only environment variables are searched for it."""


_known = KnownSecrets()


def collect_environment_secrets() -> None:
    """Learn the secrets that the environment variables hold now."""
    _known.look()


def register_secrets(values: Any) -> None:
    """Remember the texts under secret names, and in URLs, of nested plain values such as a job file's."""
    _known.add(_secret_texts(values, name=""))


def redacted_text(text: str) -> str:
    """Return the text without known secrets, what has the shape of a token, and what is secret in a URL or `name=`."""
    if len(text) < MIN_KNOWN_LENGTH:
        return text
    text = _known.redact(text)
    if "://" in text or "%3" in text:
        text = redacted_urls(text)
    text = _without_shapes(text)
    if "Bearer" in text or "Basic" in text:
        text = _HEADER.sub(rf"\g<scheme>\g<between>{REDACTED}", text)
    if "=" in text or "%3" in text or ":" in text:
        lower = text.lower()
        return _ASSIGNED.sub(_without_value, text) if any(word in lower for word in _WORDS) else text
    return text


def comparable_text(text: str) -> str:
    """Return the text without tokens by their shape and without what signs URLs, whatever the environment holds.

    It stays the same when a URL is signed again, so that it can be compared with what an earlier start has written.
    """
    return _without_shapes(unsigned_urls(text) if "://" in text else text)


def redacted_yaml(text: str) -> str:
    """Return the text of a YAML file with the values of secret names left out, too; its lines stay where they are."""
    return _FLOW.sub(_IN_YAML, _YAML_LINE.sub(rf"{_IN_YAML}\g<end>", redacted_text(text)))


def redacted_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables without those values whose names speak of a secret, and without opaque words."""
    return {name: _redacted_variable(name, value) for name, value in variables.items()}


def redacted_config(value: Any, *, name: str = "") -> Any:
    """Return nested plain values with texts under secret names left out; `pad_token` and `tokens: 1000` are none."""
    if isinstance(value, str):
        return REDACTED if name and value and is_secret_name(name) else redacted_text(value)
    if isinstance(value, Mapping):
        return {
            _redacted_key(key, _known.forms) if isinstance(key, str) else key: redacted_config(item, name=str(key))
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redacted_config(item, name=name) for item in value]
    return value


def comparable_config(value: Any, *, name: str = "") -> Any:
    """Return nested plain values, redacted as by `comparable_text`, to be compared with those of an earlier start."""
    if isinstance(value, str):
        return REDACTED if name and value and is_secret_name(name) else comparable_text(value)
    if isinstance(value, Mapping):
        return {key: comparable_config(item, name=str(key)) for key, item in value.items()}
    return [comparable_config(item, name=name) for item in value] if isinstance(value, (list, tuple)) else value


def redacted_command(words: Sequence[str]) -> list[str]:
    """Return a command line with the values of secret options left out: `--hub-token X`, `--set a.password=X`."""
    cleaned: list[str] = []
    hides_next = False
    for word in words:
        cleaned.append(REDACTED if hides_next else _redacted_word(word))
        hides_next = word.startswith("-") and "=" not in word and is_secret_name(word)
    return cleaned


@functools.lru_cache(maxsize=1024)
def is_secret_name(name: str) -> bool:
    """Return whether a key or option of this name holds a secret; of a dotted key, the last part decides."""
    return bool(_SECRET_NAME.search(name[-128:].lstrip("-").rpartition(".")[2].strip()))


@functools.lru_cache(maxsize=1024)
def _redacted_key(key: str, forms: tuple[str, ...]) -> str:
    """Return the name without secrets; asked for at every step, it is remembered for as long as `forms` is the same."""
    return redacted_text(key)


def _without_shapes(text: str) -> str:
    return _SECRET_SHAPE.sub(REDACTED, text) if any(each in text for each in _BEGINNINGS) else text


def _without_value(match: re.Match[str]) -> str:
    value = match["value"]
    bare = value.strip("\"'")
    if bare.lower() in _NO_VALUE or bare.startswith("<") or "[redacted" in bare or not is_secret_name(match["name"]):
        return match[0]
    quotes = value[0] if value[0] in "\"'" else ""
    return f"{match['name']}{match['between']}{quotes}{REDACTED}{quotes}"


def _redacted_word(word: str) -> str:
    *names, _ = word.split("=")  # `--set=a.password=X` has two names
    for index, name in enumerate(names, start=1):
        if is_secret_name(name):
            return f"{redacted_text('='.join(names[:index]))}={REDACTED}"
    return _FLOW.sub(_IN_YAML, redacted_text(word)) if "{" in word else redacted_text(word)


def _redacted_variable(name: str, value: str) -> str:
    if SECRET_VARIABLE.search(name):
        return REDACTED
    if "-" in value and " " in value:  # a command line in a variable
        value = " ".join(redacted_command(value.split(" ")))
    return _OPAQUE.sub(REDACTED, redacted_text(value))


def _secret_texts(value: Any, *, name: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secret_texts(item, name=str(key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _secret_texts(item, name=name)
    elif isinstance(value, (str, int)) and not isinstance(value, bool) and name and is_secret_name(name):
        yield str(value)
    elif isinstance(value, str) and "://" in value:
        yield from secrets_in_urls(value)
