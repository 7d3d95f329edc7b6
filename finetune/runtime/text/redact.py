"""Removes secrets from all output: one function for each kind of text.

- Messages and data (`redact_known`, `redact_known_values`): only values that are known to be secret, wherever they
  appear, and secrets in URLs. Known are the values of environment variables and job keys with secret names, the tokens
  in the job and on the command line, and those in the files of the hub's and other logins. Words are never judged by
  their looks: rows, answers, labels and messages stay as they are.
- Jobs, commands and environments, which other people read from a record (`redacted_config`, `redacted_command`,
  `redacted_yaml`, `redacted_variables`, `redact_foreign`): also values after secret names, and tokens by their shape.

Imports no torch.
"""

import netrc
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

from finetune.runtime.text.secret_patterns import (
    NO_VALUE,
    REDACTED,
    SECRET_WORD,
    is_secret_name,
    named_values,
    redacted_urls,
    secrets_in_urls,
    unsigned_urls,
    without_named,
)

MIN_KNOWN_LENGTH = 8
"""Minimum length of a known value that is searched for in texts: shorter ones occur in ordinary words."""

_MIN_LENGTH = len("sig=x")

SECRET_VARIABLE = re.compile(
    r"(^|_)(API_?KEY|AUTH|AUTHORIZATION|BEARER|COOKIES?|CREDENTIALS?|JWT|KEYS?|PASS|PASSPHRASE|PASSWD|PASSWORD|PAT|PWD"
    r"|SAS|SECRETS?|SIG|SIGNATURE|TOKENS?)(_|$)",
    re.IGNORECASE,
)
_NO_SECRET_VARIABLE = re.compile(r"^(OLD)?PWD$|_(PATH|FILE|DIR|FOLDER|SOCK|HOME|URL|ENDPOINT|NAME|TYPE|TTL)$", re.I)
"""Names of variables with the location of a secret; their values are not searched for elsewhere."""

_ESCAPE = re.compile("%[0-9A-F]{2}")
_ORDINARY = re.compile(r"\d{1,15}|(?=.{1,24}$)[a-z]+(?:[_ -][a-z]+)*")
"""Values that also occur in ordinary texts; they are redacted only under a secret name."""


class KnownSecrets:
    """Known secret values, with the forms in which they appear in texts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_variables: frozenset[str] | None = None
        self._others: frozenset[str] = frozenset()
        self.forms: tuple[str, ...] = ()

    def read_environment(self) -> None:
        """Replace the values of environment variables, and the tokens of logins, by the current ones."""
        with self._lock:
            of_variables = (value for name, value in os.environ.items() if is_secret_variable(name, value))
            self._of_variables = frozenset(filter(_is_searched_for, (*of_variables, *_login_tokens())))
            self._make_forms()

    def add(self, values: Iterable[str]) -> None:
        """Add values, until this process ends."""
        more = frozenset(filter(_is_searched_for, values))
        if not more <= self._others:
            with self._lock:
                self._others |= more
                self._make_forms()

    def redact(self, text: str) -> str:
        """Return the text without any of them."""
        if self._of_variables is None:
            self.read_environment()
        for form in self.forms:
            if form in text:
                text = text.replace(form, REDACTED)
        return text

    def _make_forms(self) -> None:
        values = (self._of_variables or frozenset()) | self._others
        forms = {form for value in values for form in _forms(value)}
        self.forms = tuple(sorted(forms, key=lambda form: (-len(form), form)))  # a longer one may contain a shorter one


def is_secret_variable(name: str, value: str) -> bool:
    """Return whether the environment variable has a secret, not just its location or a number of tokens."""
    is_number = name.upper().endswith("S") and value.isdecimal()
    is_named = SECRET_VARIABLE.search(name) and not _NO_SECRET_VARIABLE.search(name)
    return bool(is_named) and not is_number and not NO_VALUE.fullmatch(value)


def _login_tokens() -> Iterator[str]:
    """Yield the token of `hf auth login`, and the passwords in `.netrc`, where `wandb login` writes its key."""
    cache = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    with suppress(OSError, ValueError, RuntimeError):
        yield Path(os.environ.get("HF_TOKEN_PATH") or cache / "token").expanduser().read_text(encoding="utf-8").strip()
    with suppress(OSError, ValueError, RuntimeError, netrc.NetrcParseError):
        logins = netrc.netrc(Path(os.environ.get("NETRC") or "~/.netrc").expanduser())
        yield from (password for _, _, password in logins.hosts.values() if password)


def _is_searched_for(value: str) -> bool:
    """Return whether texts are searched for a value: not if it is short, a number, plain words or an existing path."""
    if len(value) < MIN_KNOWN_LENGTH or _ORDINARY.fullmatch(value) or REDACTED in value:
        return False
    with suppress(OSError, ValueError, RuntimeError):
        return not (value.startswith(("/", "~", ".")) and Path(value).expanduser().exists())
    return True


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
        yield value.replace("\\", "\\\\").replace('"', '\\"')  # as in JSON
        yield from (line for line in value.splitlines() if _is_searched_for(line) and line != value)


_YAML_LINE = re.compile(
    rf"(?P<head>[ \t]*(?:-[ \t]+)*[\"']?(?:{SECRET_WORD})[\"']?[ \t]*:)"
    r"(?P<value>[ \t]+(?:\"(?:[^\"\\]|\\.)*\"|'(?:[^']|'')*'|[^\s#].*?))?(?P<end>[ \t]*(?:[ \t]#.*)?)",
    re.IGNORECASE,
)
_YAML_COMMENT = re.compile(
    rf"(?P<head>#[ \t]*(?:-[ \t]+)*(?:{SECRET_WORD})[ \t]*:[ \t]+)(?P<value>\S.*)", re.IGNORECASE
)
_FLOW = re.compile(
    rf"(?P<head>[{{,\[]\s*[\"']?(?:{SECRET_WORD})[\"']?[ \t]*:\s+)"
    r"(?P<value>\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\n]|'')*'|\[[^\]\n]*\]|\{[^}\n]*\}|[^,}\]\n]+)",
    re.IGNORECASE,
)

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
_known = KnownSecrets()


def collect_environment_secrets() -> None:
    """Collect the secrets of the current environment variables."""
    _known.read_environment()


def register_secrets(values: Any) -> None:
    """Register the secrets of nested plain values, such as a job file's."""
    _known.add(_secret_texts(values, name=""))


def redact_known(text: str) -> str:
    """Return the message or the data without known secrets and secrets in URLs; all else is unchanged.

    The function is idempotent, also on its result within JSON.
    """
    if len(text) < _MIN_LENGTH:
        return text
    text = _known.redact(text)
    return redacted_urls(text) if "://" in text or "%3" in text else text


def redact_known_values(value: Any) -> Any:
    """Return nested plain values with `redact_known` applied to every text and key."""
    if isinstance(value, str):
        return redact_known(value)
    if isinstance(value, Mapping):
        return {redact_known_values(key): redact_known_values(item) for key, item in value.items()}
    return [redact_known_values(item) for item in value] if isinstance(value, list | tuple) else value


def redact_foreign(text: str) -> str:
    """Return a command, a script or a value of a job also without tokens by their shape and values of secret names."""
    return without_named(_SECRET_SHAPE.sub(REDACTED, redact_known(text)))


def comparable_text(text: str) -> str:
    """Return the text without tokens, named secrets and signatures of URLs, regardless of the environment.

    A new signature of a URL does not change it, so that it can be compared with that of an earlier start.
    """
    return without_named(_SECRET_SHAPE.sub(REDACTED, unsigned_urls(text) if "://" in text else text))


def redacted_yaml(text: str) -> str:
    """Return the text of a YAML file, also without values of secret names; the line numbers do not change."""
    lines: list[str] = []
    secret_column: int | None = None
    key_number = 0  # a value continues as long as lines are indented more than its key
    for number, line in enumerate(text.split("\n")):
        column = len(line) - len(line.lstrip(" \t-"))
        if secret_column is not None and (column > secret_column or not line.strip()):
            lines.append("")
            if line.strip() and REDACTED not in lines[key_number]:
                lines[key_number] += f" '{REDACTED}'"
            continue
        match = _YAML_LINE.fullmatch(line)
        secret_column, key_number = (None if match is None else column), number
        if match is not None and match["value"] and not NO_VALUE.fullmatch(match["value"].strip(" \t\"'")):
            line = f"{match['head']} '{REDACTED}'{match['end']}"
        lines.append(_YAML_COMMENT.sub(_in_yaml, line) if "#" in line else line)
    return redact_foreign(_FLOW.sub(_in_yaml, "\n".join(lines)))


def redacted_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables without values of secret names, and without secrets in other values."""
    return {
        name: REDACTED if SECRET_VARIABLE.search(name) else redact_foreign(value) for name, value in variables.items()
    }


def redacted_config(value: Any, *, name: str = "") -> Any:
    """Return nested plain values without the values of secret names; `pad_token` and `tokens: 1000` are not secret."""
    return _cleaned(value, name=name, clean=redact_foreign)


def comparable_config(value: Any, *, name: str = "") -> Any:
    """Return nested plain values, redacted as by `comparable_text`, for comparison with an earlier start's."""
    return _cleaned(value, name=name, clean=comparable_text)


def _cleaned(value: Any, *, name: str, clean: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return REDACTED if value and is_secret_name(name) else clean(value)
    if isinstance(value, Mapping):
        named = ((clean(key) if isinstance(key, str) else key, item, own) for key, item, own in _named(value, name))
        return {key: _cleaned(item, name=own, clean=clean) for key, item, own in named}
    if isinstance(value, (list, tuple)):
        return [_cleaned(item, name=own, clean=clean) for _, item, own in _named(value, name)]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return REDACTED if is_number and is_secret_name(name) and name not in _NAMES_OF_NUMBERS else value


_NAMES_OF_NUMBERS = frozenset({"token", "bearer", "sig", "signature"})


def _named(values: Mapping[Any, Any] | Sequence[Any], name: str) -> Iterator[tuple[Any, Any, str]]:
    """Yield each item with its key and the name that decides whether it is secret, which may be that of its parent.

    In a list, the item after an option `--password` gets its name, and so does the value of `{name: PASSWORD, value:
    X}`.
    """
    if isinstance(values, Mapping):
        variable = values.get("name")
        for key, item in values.items():
            own = str(variable) if key == "value" and isinstance(variable, str) else str(key)
            yield key, item, name if is_secret_name(name) else own
        return
    before = None
    for index, item in enumerate(values):
        yield index, item, before if before is not None and not str(item).startswith("-") else name
        before = item if isinstance(item, str) and item.startswith("-") and is_secret_name(item) else None


def redacted_command(command: Sequence[str]) -> list[str]:
    """Return a command line without the values of secret options: `--hub-token X`, `--set a.password=X`."""
    redacted = []
    for _, word, option in _named(command, ""):
        first = re.match(r"-{0,2}[\w.-]{1,128}(?=\s)", word)
        *names, value = word.split("=")  # `--set=a.password=X` has two names
        secret = next((n for n, name in enumerate(names, 1) if any(map(is_secret_name, name.split(".")))), None)
        if is_secret_name(option):
            word = REDACTED
        elif first is not None and is_secret_name(first[0]):  # `password X`, without the `=`
            word = f"{first[0]} {REDACTED}"
        elif secret is not None and not (secret == len(names) and NO_VALUE.fullmatch(value)):
            word = f"{redact_foreign('='.join(names[:secret]))}={REDACTED}"
        else:
            word = redacted_yaml(word) if ":" in word else redact_foreign(word)
        redacted.append(word)
    return redacted


def register_command(command: Sequence[str]) -> None:
    """Register the secrets of our own command line, in which `--secret` only names one."""
    for before, (_, word, name) in zip(["", *command], _named(command, ""), strict=False):
        key, _, value = word.rpartition("=")
        if "--secret" not in (before, key):
            _known.add(_secret_texts(value, name=key) if is_secret_name(key) else _secret_texts(word, name=name))


def _in_yaml(match: re.Match[str]) -> str:
    return match[0] if NO_VALUE.fullmatch(match["value"].strip("\"' ")) else f"{match['head']}'{REDACTED}'"


def _secret_texts(value: Any, *, name: str) -> Iterator[str]:
    if isinstance(value, Mapping | list | tuple):
        for key, item, own in _named(value, name):
            yield from _secret_texts(item, name=own)
            if isinstance(key, str):
                yield from _secret_texts(key, name="")
    elif isinstance(value, bool) or value is None:
        return
    elif is_secret_name(name):
        yield str(value)
    elif isinstance(value, str):
        yield from secrets_in_urls(value) if "://" in value else ()
        yield from (match[0] for match in _SECRET_SHAPE.finditer(value))
        yield from (value[start:end] for start, end in named_values(value))
