"""Values under the name of a secret in a text: `password=X`, `"password": "X"`, `--password X`, quoted at any depth."""

import functools
import re
from collections.abc import Iterator

from finetune.runtime.text.secret_urls import REDACTED

SECRET_WORD = (
    r"(?:[\w-]*(?:password|passwd|passphrase)|(?:\w+[_-])?(?:secrets?|credentials?|jwt))(?:[_-]\w+)?"
    r"|(?:\w+[_-])?(?:api|access|private|secret|auth|signing|encryption|account|shared|storage)[_-]?keys?(?:[_-]id)?"
    r"|(?:\w+[_-])?(?:auth|access|api|hf|hub|refresh|session|security|wandb|github|gitlab|secret|private|bearer)"
    r"[_-]?tokens?"
    r"|token|authorization|bearer|sig|signature"
    r"|(?-i:(?:[A-Z0-9]+_)+(?:AUTH|COOKIE|KEY|PASS|PAT|PWD|SAS|SIG|SIGNATURE|TOKEN))"  # of environment variables
)
_SECRET_NAME = re.compile(rf"^(?:{SECRET_WORD})$", re.IGNORECASE)
_WORDS = re.compile(r"pass|secret|credential|jwt|key|token|auth|bearer|sig|(?-i:PWD|_PAT|_SAS|COOKIE)", re.IGNORECASE)
"""Every secret name contains one of them."""

_QUOTE = r"\\{0,8}[\"'`]"  # also of texts within texts
_QUOTES = r"(?:\\{0,8}[\"']){1,8}"
_NAMED = re.compile(
    r"(?<![A-Za-z0-9])(?P<name>[A-Za-z][\w-]{1,63}+)(?:"
    rf"(?:{_QUOTES})?[ \t]{{0,8}}(?:[:=]?=>?|%(?:25)?3D)[ \t]{{0,8}}"  # name=value
    rf"|{_QUOTES}[ \t]{{0,8}}:\s{{0,8}}"  # "name": value
    rf"|(?:{_QUOTES})?[ \t]{{0,4}},?\s{{0,40}}(?:-\s)?(?:{_QUOTES})?value(?:{_QUOTES})?[ \t]{{0,4}}:[ \t]{{0,8}}"  # of
    r"|:[ \t]{1,4}(?:Bearer|Basic|Token)[ \t]{1,4}(?=\w)"  # a list of variables; and this is of a header
    r"|(?P<colon>`?:[ \t]{0,8}))"
    rf"|(?<=-)(?P<option>[A-Za-z][\w-]{{1,63}}+)(?:{_QUOTES}[ \t]{{0,4}},\s{{0,40}}|(?:[ \t]|\\\n){{1,8}})",
    re.IGNORECASE,
)
"""A name and the text between it and its value; whether the name is secret is decided afterwards."""

_INSIDE = re.compile(
    r"(?:\\{0,8}[\"'])?(?:[\[{,]\s{0,40}|(?:\\{0,8}[\"'])?[\w.-]{1,64}(?:\\{0,8}[\"']\s?:\s{0,8}|:\s))*+"
)
"""The text before the next value of a list or mapping."""

_OPENING = re.compile(
    rf"(?>(?P<first>{_QUOTE})(?P<more>{_QUOTE}){{0,15}})(?!\s|\Z)(?(more)(?![,;:&)\]}}])|(?![,;:&)\]}}](?!\w)))"
)
"""Quotes before a value, except those around nothing and closing ones."""

_BARE = re.compile(r"(?:[^\s,;&\"'`)\]}\\]|\\(?![\\\"'`])|[,;&](?![\s\"'\\`]|\Z|[\w.-]{1,64}=)|[)\]}](?=\w))+")
_CONTINUED = re.compile(r"[\w\\\"'`$]")
_MAX_QUOTED = 2000
"""Maximum length of a value in quotes; a longer one ends with its line."""

NO_VALUE = re.compile(
    r"|none|null|true|false|[01]|\.\.\.|\[redacted.*|<[^<>]*>|(?-i:\$\{?[A-Z_][A-Z0-9_]*\}?)",
    re.IGNORECASE | re.DOTALL,
)
_SENTENCE = re.compile(r"[A-Za-z'.-]*[,.:;!?]*|[\d.,:]+|[\[{(<*&|>].*", re.DOTALL)
"""Text after `name:` in messages that does not look like a secret."""

_OPTION_TEXT = re.compile(
    r"-.*|(?:[A-Z]+_)*(?:TEXT|NAME|VALUE|VARIABLE|TOKEN|PASSWORD|SECRET|KEY|FILE|PATH|STRING)(?:[=:][A-Z:]*)?"
    r"|(?:and|are|as|by|can|cannot|for|from|has|in|instead|is|must|needs|not|of|on|option|or|takes|that|the|to|was|with)"
    r"[,.:;]?"
)
"""Text after `--name` in help and messages that is not its value."""


@functools.lru_cache(maxsize=1024)
def is_secret_name(name: str) -> bool:
    """Return whether the value of a key or option with this name is secret; the last part of a dotted key decides."""
    return bool(_SECRET_NAME.search(name[-128:].lstrip("-").rpartition(".")[2].strip()))


def without_named(text: str) -> str:
    """Return the text without the values of secret names: `password=X`, `"password": "X"`, `--password X`."""
    pieces, position = [], 0
    for start, end in named_values(text):
        pieces += [text[position:start], REDACTED]
        position = end
    return "".join([*pieces, text[position:]])


def named_values(text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each value of a secret name; other values are searched for more names."""
    if not _WORDS.search(text):
        return
    match = _NAMED.search(text)
    while match is not None:
        position = match.end()
        is_secret = is_secret_name(match["name"] or match["option"])
        has_values = is_secret and text.startswith(("[", "{"), position) and not text.startswith(REDACTED, position)
        while is_secret:
            position = _INSIDE.match(text, position).end() if has_values else position  # type: ignore[union-attr]
            start, end = _value_at(text, position)
            value = text[start:end]
            no_value = _SENTENCE if match["colon"] else _OPTION_TEXT if match["option"] else NO_VALUE
            if not (NO_VALUE.fullmatch(value) or (start == position and no_value.fullmatch(value))):
                yield start, end
            is_secret, position = has_values and end > position, max(position, end)
        match = _NAMED.search(text, position)


def _value_at(text: str, start: int) -> tuple[int, int]:
    """Return the start and end of the value: within quotes, or of a word that may be quoted in parts."""
    position, first = start, None
    while position < len(text) and (first is None or _CONTINUED.match(text, position)):
        opening, bare = _OPENING.match(text, position), _BARE.match(text, position)
        if opening is not None:
            position = opening.end()
            quote = re.escape(opening["more"] or opening["first"])
            closing = re.compile(rf"(?<!\\){quote}").search(text, position, position + _MAX_QUOTED)
            line_end = text.find("\n", position)
            end = closing.start() if closing is not None else line_end if line_end >= 0 else len(text)
            inside, position = (position, end), end if closing is None else closing.end()
        elif bare is not None:
            position = bare.end()
            inside = (bare.start(), bare.start() + len(bare[0].rstrip(".:!?")))
        else:
            break
        first = inside if first is None else (start, position)
    return first or (start, start)
