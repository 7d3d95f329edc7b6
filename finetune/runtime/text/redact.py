"""Removes secrets from all output: one function for each kind of text.

- Messages and data (`redact_known`, `redact_known_values`): only values that are known to be secret, wherever they
  appear, and secrets in URLs. Known are the values of environment variables and job keys with secret names, the tokens
  in the job and on the command line, and those in the files of the hub's and other logins. Words are never judged by
  their looks: rows, answers, labels and messages stay as they are.
- Jobs, commands and environments, which other people read from a record (`redacted_config`, `redacted_command`,
  `redacted_yaml`, `redacted_variables`, `redact_foreign`): also values after secret names, and tokens by their shape.

Imports no torch.
"""

import functools
import netrc
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from finetune.runtime.optional import lazily

with lazily():
    from ruamel import yaml

REDACTED = "[redacted]"

MIN_KNOWN_LENGTH = 8
"""Minimum length of a known value that is searched for in texts: shorter ones occur in ordinary words."""

SECRET_VARIABLE = re.compile(
    r"(^|_)(API_?KEY|AUTH|AUTHORIZATION|BEARER|COOKIES?|CREDENTIALS?|JWT|KEYS?|PASS|PASSPHRASE|PASSWD|PASSWORD|PAT|PWD"
    r"|SAS|SECRETS?|SIG|SIGNATURE|TOKENS?)(_|$)",
    re.IGNORECASE,
)
_NO_SECRET_VARIABLE = re.compile(r"^(OLD)?PWD$|_(PATH|FILE|DIR|FOLDER|SOCK|HOME|URL|ENDPOINT|NAME|TYPE|TTL)$", re.I)
"""Names of variables with the location of a secret; their values are not searched for elsewhere."""

_SECRET_KEY = (
    r"(?:[\w-]*(?:password|passwd|passphrase)|(?:\w+[_-])?(?:secrets?|credentials?|jwt))(?:[_-]\w+)?"
    r"|(?:\w+[_-])?(?:api|access|private|secret|auth|signing|encryption|account|shared|storage)[_-]?keys?(?:[_-]id)?"
    r"|(?:\w+[_-])?(?:auth|access|api|hf|hub|refresh|session|security|wandb|github|gitlab|secret|private|bearer)"
    r"[_-]?tokens?"
    r"|token|authorization|bearer|sig|signature"
    r"|(?-i:(?:[A-Z0-9]+_)+(?:AUTH|COOKIE|KEY|PASS|PAT|PWD|SAS|SIG|SIGNATURE|TOKEN))"  # of environment variables
)
_SECRET_NAME = re.compile(_SECRET_KEY, re.IGNORECASE)
_SECRET_PARAMETER = re.compile(
    r"(?:^|[-_.])(?:sig|signature|signed|token|key|apikey|secret|credentials?|password|passwd|pwd|pass|auth|authorization"
    r"|jwt|sas|session|sessionid|ticket|hmac|policy|assertion|code)$"
    r"|^(?:awsaccesskeyid|googleaccessid|hdnea|hdnts|(?:access|auth|api|id|refresh|security|session|sas)_?token"
    r"|(?:api|access|account|secret|private|subscription|client)_?(?:key|secret)(?:_?id)?|key-pair-id)$",
    re.IGNORECASE,
)
_SIGNING_PARAMETER = re.compile(
    r"^(?:x-(?:amz|goog|ms|oss|cos)-.*|expires?|e|exp|se|st|sp|spr|sv|sr|ss|srt|sip|si|sk(?:oid|tid|t|e|s|v)|policy"
    r"|response-content-.*)$",
    re.IGNORECASE,
)
"""Parameters of a URL that accompany a signature and change with it."""

_SECRET_SHAPE = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"(?:hf_|api_org_|npm_|gh[opusr]_|sk-|wandb_v1_)[A-Za-z0-9]{16,}[A-Za-z0-9_-]*"
    r"|(?:sk-(?:proj|ant|or|svcacct|live|test)|[sr]k_(?:live|test)|github_pat|glpat|xox[abeprs]|dop_v1|pypi)[_-]"
    r"[A-Za-z0-9_-]{12,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{20,}|SG\.[\w-]{16,99}\.[\w-]{16,}"
    r"|eyJ[\w-]{10,500}\.[\w-]{10,}(?:\.[\w-]+)?"
    r")|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)

NO_VALUE = re.compile(
    r"|none|null|true|false|[01]|\.\.\.|\[redacted.*|<[^<>]*>|(?-i:\$\{?[A-Z_][A-Z0-9_]*\}?)",
    re.IGNORECASE | re.DOTALL,
)
"""What stands for no value, or for one elsewhere."""


@functools.lru_cache(maxsize=1024)
def is_secret_name(name: str) -> bool:
    """Return whether the value of a key or option with this name is secret; the last part of a dotted key decides."""
    return bool(_SECRET_NAME.fullmatch(name[-128:].lstrip("-").rpartition(".")[2].strip()))


def is_secret_variable(name: str, value: str) -> bool:
    """Return whether the environment variable has a secret, not just its location or a number of tokens."""
    is_number = name.upper().endswith("S") and value.isdecimal()
    is_named = SECRET_VARIABLE.search(name) and not _NO_SECRET_VARIABLE.search(name)
    return bool(is_named) and not is_number and not NO_VALUE.fullmatch(value)


def is_secret_parameter(name: str) -> bool:
    """Return whether a URL's parameter of this name holds a secret."""
    return bool(_SECRET_PARAMETER.search(name.strip("_")))


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
        for quoted in (quote(value, safe=safe, errors="replace") for safe in ("", "/")):
            yield from (quoted, _ESCAPE.sub(lambda escape: escape[0].lower(), quoted))
        yield repr(value)[1:-1]
        yield value.replace("\\", "\\\\").replace('"', '\\"')  # as in JSON
        yield from (line for line in value.splitlines() if _is_searched_for(line) and line != value)


_known = KnownSecrets()


def collect_environment_secrets() -> None:
    """Collect the secrets of the current environment variables."""
    _known.read_environment()


def register_secrets(values: Any) -> None:
    """Register the secrets of nested plain values, such as a job file's."""
    _known.add(_secret_texts(values, name=""))


def register_command(command: Sequence[str]) -> None:
    """Register the secrets of our own command line, in which `--secret` only names one."""
    for before, (_, word, name) in zip(["", *command], _named(command, ""), strict=False):
        key, _, value = word.rpartition("=")
        if "--secret" not in (before, key):
            _known.add(_secret_texts(value, name=key) if is_secret_name(key) else _secret_texts(word, name=name))


def _secret_texts(value: Any, *, name: str) -> Iterator[str]:
    if isinstance(value, Mapping | list | tuple):
        for key, item, own in _named(value, name):
            yield from _secret_texts(item, name=own)
            if isinstance(key, str):
                yield from _secret_texts(key, name="")
    elif is_secret_name(name):
        yield str(value)
    elif isinstance(value, str):
        yield from secrets_in_urls(value) if "://" in value else ()
        yield from (match[0] for match in _SECRET_SHAPE.finditer(value))
        yield from (value[start:end] for start, end, _ in _named_values(value))


def redact_known(text: str) -> str:
    """Return the message or the data without known secrets and secrets in URLs; all else is unchanged.

    The function is idempotent, also on its result within JSON.
    """
    text = _known.redact(text)
    return redacted_urls(text) if "://" in text else text


def redact_known_values(value: Any) -> Any:
    """Return nested plain values with `redact_known` applied to every text and key."""
    if isinstance(value, str):
        return redact_known(value)
    if isinstance(value, Mapping):
        return {redact_known_values(key): redact_known_values(item) for key, item in value.items()}
    return [redact_known_values(item) for item in value] if isinstance(value, list | tuple) else value


def redact_foreign(text: str) -> str:
    """Return a command, a script or a value of a job also without tokens by their shape and values of secret names."""
    return _without_named(_SECRET_SHAPE.sub(REDACTED, redact_known(text)))


def redacted_config(value: Any, *, name: str = "") -> Any:
    """Return nested plain values without the values of secret names; `pad_token` and `tokens: 1000` are not secret."""
    return _cleaned(value, name=name, clean=redact_foreign)


def comparable_config(value: Any, *, name: str = "") -> Any:
    """Return nested plain values without secrets and signatures of URLs, to be compared with an earlier start's.

    They do not depend on the environment, and a new signature of a URL does not change them.
    """

    def clean(text: str) -> str:
        unsigned = _URL.sub(lambda match: unsigned_url(match[0]), text)
        return _without_named(_SECRET_SHAPE.sub(REDACTED, unsigned))

    return _cleaned(value, name=name, clean=clean)


def _cleaned(value: Any, *, name: str, clean: Callable[[str], str]) -> Any:
    if isinstance(value, str | Mapping | list | tuple) and value and is_secret_name(name):
        return REDACTED
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        named = ((clean(key) if isinstance(key, str) else key, item, own) for key, item, own in _named(value, name))
        return {key: _cleaned(item, name=own, clean=clean) for key, item, own in named}
    if isinstance(value, (list, tuple)):
        return [_cleaned(item, name=own, clean=clean) for _, item, own in _named(value, name)]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return REDACTED if is_number and is_secret_name(name) and name not in ("token", "bearer", "sig") else value


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


def redacted_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables without values of secret names, and without secrets in other values."""
    return {
        name: REDACTED if SECRET_VARIABLE.search(name) else redact_foreign(value) for name, value in variables.items()
    }


_ASSIGNED = re.compile(r"(?P<name>-{0,2}[\w.-]{1,128})(?P<sign>[:=]?\s+|=)(?P<value>.+)", re.DOTALL)


def redacted_command(command: Sequence[str]) -> list[str]:
    """Return a command line without the values of secret options: `--hub-token X`, `--set a.password=X`."""
    redacted = []
    for _, word, option in _named(command, ""):
        head, assigned = "", _ASSIGNED.fullmatch(word)
        while assigned is not None and not any(map(is_secret_name, assigned["name"].split("."))):
            head += word[len(head) : len(head) + assigned.start("value")]  # `--set=a.password=X` has two names
            assigned = _ASSIGNED.fullmatch(assigned["value"])
        if is_secret_name(option):
            word = REDACTED
        elif assigned is not None and not NO_VALUE.fullmatch(assigned["value"]):
            word = f"{redact_foreign(head)}{assigned['name']}{assigned['sign']}{REDACTED}"
        else:
            word = redact_foreign(word)
        redacted.append(word)
    return redacted


_COMMENT = re.compile(rf"(#.*?(?<![\w-])(?:{_SECRET_KEY})[ \t]*:[ \t]+)\S.*", re.IGNORECASE)


def redacted_yaml(text: str) -> str:
    """Return the text of a YAML file, also without values of secret names; the line numbers do not change."""
    with suppress(yaml.error.YAMLError, RecursionError, ValueError):
        roots = list(yaml.YAML(typ="safe", pure=True).compose_all(text))
        for node in sorted(_secret_nodes(roots), key=lambda node: -node.start_mark.index):
            start, end = node.start_mark.index, node.end_mark.index
            has_own_line = not text[:start].rpartition("\n")[2].strip(" ")  # it must be indented more than its key
            newlines = "\n" * text.count("\n", start, end)
            text = f"{text[:start]}{' ' * has_own_line}'{REDACTED}'{newlines}{text[end:]}"
    return redact_foreign(_COMMENT.sub(rf"\1{REDACTED}", text))


def _secret_nodes(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yield the outermost nodes of YAML whose values are secret by their names."""
    for node in nodes:
        if isinstance(node, yaml.SequenceNode):
            yield from _secret_nodes(node.value)
        elif isinstance(node, yaml.MappingNode):
            variable = next((item.value for key, item in node.value if key.value == "name"), "")
            for key, item in node.value:
                is_named = is_secret_name(str(key.value)) or (key.value == "value" and is_secret_name(str(variable)))
                is_value = not isinstance(item, yaml.ScalarNode) or not NO_VALUE.fullmatch(item.value)
                yield from (item,) if is_named and is_value else _secret_nodes((item,))


_QUOTE = r"\\{0,8}[\"']"  # also of texts within texts
_NAMED = re.compile(
    r"(?<![A-Za-z0-9])(?P<name>[A-Za-z][\w-]{1,63}+)"
    rf"(?P<quotes>(?:{_QUOTE}){{0,8}})(?:"
    r"[ \t]{0,8}[:=]?=>?[ \t]{0,8}"  # name=value
    r"|:[ \t]{1,4}(?:Bearer|Basic|Token)[ \t]{1,4}(?=\w)"  # of a header
    rf"|[ \t]{{0,4}},?\s{{0,40}}(?:-\s)?(?:{_QUOTE})?value(?:{_QUOTE})?[ \t]{{0,4}}:[ \t]{{0,8}}"  # of a variable
    r"|(?P<colon>[ \t]{0,8}:\s{0,8}))"  # "name": value
    rf"|(?<![\w-])--?(?P<option>[A-Za-z][\w-]{{1,63}}+)(?:{_QUOTE}[ \t]{{0,4}},\s{{0,40}}|(?:[ \t]|\\\n){{1,8}})",
    re.IGNORECASE,
)
"""A name and the text between it and its value; whether the name is secret is decided afterwards."""

_VALUE = re.compile(
    rf"(?:{_QUOTE}|`){{1,200}}+(?![\s,;:&)\]}}]|\Z)(?P<quoted>[^\"'`\\]{{0,2000}})|(?P<bare>[^\s,;&\"'`)\]}}\\]+)"
)
_LIST = re.compile(r"\[(?:[^][]|\[[^][]*\]){0,2000}\]|\{(?:[^}{]|\{[^}{]*\}){0,2000}\}")
_SENTENCE = re.compile(r"[A-Za-z'.-]*[.:!?]*|[\d.:]+|[\[{(<*&|>].*", re.DOTALL)
"""Text after `name:` in a sentence that is not its value."""


def _without_named(text: str) -> str:
    """Return the text without the values of secret names: `password=X`, `"password": "X"`, `--password X`."""
    pieces, position = [], 0
    for start, end, redacted in _named_values(text):
        pieces += [text[position:start], redacted]
        position = end
    return "".join([*pieces, text[position:]])


def _named_values(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield the start and end of each value of a secret name, and what takes its place."""
    position = 0
    for match in _NAMED.finditer(text):
        if match.start() < position or not is_secret_name(match["name"] or match["option"]):
            continue
        is_sentence = match["colon"] is not None and not match["quotes"]
        value, listed = _VALUE.match(text, match.end()), _LIST.match(text, match.end())
        if listed is not None and not is_sentence and not NO_VALUE.fullmatch(listed[0]):
            position = listed.end()
            yield listed.start(), position, f"{match['quotes'] or ''}{REDACTED}{match['quotes'] or ''}"
        elif value is not None and not NO_VALUE.fullmatch(found := value["quoted"] or value["bare"] or ""):
            is_word = value["bare"] and (
                _SENTENCE.fullmatch(found) if is_sentence else match["option"] and found.startswith("-")
            )
            if not is_word:
                position = value.end()
                yield position - len(found), position, REDACTED


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,15}://[^\s\"'<>`]+")
_USER = re.compile(r"^(?P<user>[^/?#@]*|[^/?#@:]*:(?!\d{1,5}(?:[/?#]|$))[^?#@\s]*)@")
"""Everything before the `@`; a password may contain slashes, but text after a port is not a password."""

_CONTAINERS = ("hf", "abfs", "abfss", "wasb", "wasbs")
"""Schemes in which a word before an `@` is a container or a repository, not a user."""

_PARAMETER = re.compile(r"(?P<lead>[?&;#]|&amp;)(?P<name>[^=&;#?\s]{1,80})=(?P<value>[^&;#\s\"'<>`]*)")


def redacted_urls(text: str) -> str:
    """Return the text without the users and the secret parameters in its URLs."""

    def without_value(match: re.Match[str]) -> str:
        value = match["value"]
        if not value or value.startswith(REDACTED) or not is_secret_parameter(unquote(match["name"])):
            return match[0]
        end = value[len(value.rstrip(":,.)]}")) :]  # of the sentence
        return f"{match['lead']}{match['name']}={REDACTED}{end}"

    def redacted_url(match: re.Match[str]) -> str:
        scheme, _, rest = match[0].partition("://")
        if credentials := _USER.match(rest):
            user = credentials["user"]
            is_public = user == "git" or REDACTED in user or (scheme.lower() in _CONTAINERS and ":" not in user)
            rest = rest if is_public else f"{REDACTED}@{rest[credentials.end() :]}"
        return f"{scheme}://{_PARAMETER.sub(without_value, rest)}"

    return _URL.sub(redacted_url, text)


def unsigned_url(url: str) -> str:
    """Return the URL without user, token and signature.

    >>> unsigned_url("https://me:word@host/rows.jsonl?part=1&X-Amz-Date=2&X-Amz-Signature=3#end")
    'https://host/rows.jsonl?part=1#end'
    """
    scheme, _, rest = url.partition("://")
    rest = rest if scheme.lower() in _CONTAINERS and ":" not in rest.partition("@")[0] else _USER.sub("", rest)
    rest, hash_, fragment = rest.partition("#")
    address, mark, query = rest.partition("?")
    parts = [(part, unquote(part.partition("=")[0])) for part in query.split("&") if mark]
    kept = [part for part, name in parts if not is_secret_parameter(name)]
    if len(kept) < len(parts):  # otherwise the parameters of signatures mean something else
        kept = [part for part in kept if not _SIGNING_PARAMETER.search(unquote(part.partition("=")[0]))]
    return f"{scheme}://{address}{'?' if kept else ''}{'&'.join(kept)}{hash_}{fragment}"


def secrets_in_urls(text: str) -> Iterator[str]:
    """Yield the secrets in the text's URLs, both encoded and decoded."""
    for url in _URL.findall(text):
        scheme, _, rest = url.partition("://")
        user = _USER.match(rest)
        secrets = [] if user is None or scheme.lower() in _CONTAINERS else [user["user"], *user["user"].split(":", 1)]
        parameters = _PARAMETER.finditer(rest)
        secrets += [match["value"] for match in parameters if is_secret_parameter(unquote(match["name"]))]
        for secret in secrets:
            yield from (secret, unquote(secret))


def without_query(url: str) -> str:
    """Return the URL without its query and fragment; a path is returned unchanged."""
    return re.split(r"[?#]", url, maxsplit=1)[0] if re.match(r"https?://", url, re.IGNORECASE) else url
