"""Patterns of secrets in texts: credentials and signatures in URLs, and values under the names of secrets.

The value of a name may follow as `password=X`, `"password": "X"` or `--password X`, quoted at any depth.
"""

import functools
import re
from collections.abc import Iterator
from urllib.parse import unquote

REDACTED = "[redacted]"

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,15}://[^\s\"'<>`]+")
_USER = re.compile(r"^(?P<user>[^/?#@]*|[^/?#@:]*:(?!\d{1,5}(?:[/?#]|$))[^?#@\s]*)@")
"""Everything before the `@`; a password may contain slashes, but text after a port is not a password."""

_CONTAINERS = ("hf", "abfs", "abfss", "wasb", "wasbs")
"""Schemes in which a word before an `@` is a container or a repository, not a user."""

_PARAMETER = re.compile(r"(?P<lead>[?&;#]|&amp;)(?P<name>[^=&;#?\s]{1,80})=(?P<value>[^&;#\s\"'<>`]*)")
_ENCODED_PARAMETER = re.compile(
    r"(?P<lead>%3F|%26|%3B)(?P<name>(?:(?!%26|%3B|%3D)[^=&\s]){1,80}?)%3D(?P<value>(?:(?!%26|%3B)[^&\s\"'<>`])*)", re.I
)
_ENCODED_USER = re.compile(r"(?P<lead>%3A%2F%2F)(?P<user>(?:(?!%2F|%3F|%40)[^&?#/@\s]){1,400}?)(?P<at>%40)", re.I)

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
"""Parameters that accompany a signature and change with it."""


def redacted_urls(text: str) -> str:
    """Return the text without the secrets in its URLs, including percent-encoded URLs within URLs."""
    text = _ENCODED_PARAMETER.sub(_without_encoded, _ENCODED_USER.sub(rf"\g<lead>{REDACTED}\g<at>", text))
    return _URL.sub(_redacted_url, text)


def unsigned_urls(text: str) -> str:
    """Return the text with unsigned URLs: without users, tokens and the parameters of signatures."""
    return _URL.sub(lambda match: unsigned_url(match[0]), text)


def unsigned_url(url: str) -> str:
    """Return the URL without user, token and signature.

    >>> unsigned_url("https://me:word@host/rows.jsonl?part=1&X-Amz-Date=2&X-Amz-Signature=3#end")
    'https://host/rows.jsonl?part=1#end'
    """
    scheme, _, rest = url.partition("://")
    rest = rest if scheme.lower() in _CONTAINERS and ":" not in rest.partition("@")[0] else _USER.sub("", rest)
    rest, hash_, fragment = rest.partition("#")
    address, mark, query = rest.partition("?")
    parts = query.split("&") if mark else []
    names = [unquote(part.partition("=")[0]) for part in parts]
    is_signed = any(map(is_secret_parameter, names))  # otherwise the parameters of signatures mean something else
    kept = [
        part
        for part, name in zip(parts, names, strict=True)
        if not is_secret_parameter(name) and not (is_signed and _SIGNING_PARAMETER.search(name))
    ]
    return f"{scheme}://{address}{'?' if kept else ''}{'&'.join(kept)}{hash_}{fragment}"


def secrets_in_urls(text: str) -> Iterator[str]:
    """Yield the secrets in the text's URLs, both encoded and decoded."""
    for url in _URL.findall(text):
        scheme, _, rest = url.partition("://")
        user = _USER.match(rest)
        secrets = [] if user is None or scheme.lower() in _CONTAINERS else [user["user"], *user["user"].split(":", 1)]
        secrets += [
            match["value"] for match in _PARAMETER.finditer(rest) if is_secret_parameter(unquote(match["name"]))
        ]
        for secret in secrets:
            yield from (secret, unquote(secret))


def is_secret_parameter(name: str) -> bool:
    """Return whether a URL's parameter of this name holds a secret."""
    return bool(_SECRET_PARAMETER.search(name.strip("_")))


def without_query(url: str) -> str:
    """Return the URL without its query and fragment; a path is returned unchanged."""
    return re.split(r"[?#]", url, maxsplit=1)[0] if re.match(r"https?://", url, re.IGNORECASE) else url


def _redacted_url(match: re.Match[str]) -> str:
    scheme, _, rest = match[0].partition("://")
    if credentials := _USER.match(rest):
        user = credentials["user"]
        is_public = user == "git" or REDACTED in user or (scheme.lower() in _CONTAINERS and ":" not in user)
        rest = rest if is_public else f"{REDACTED}@{rest[credentials.end() :]}"
    if "=" in rest:
        rest = _PARAMETER.sub(_without_value, rest)
    return f"{scheme}://{rest}"


def _without_value(match: re.Match[str]) -> str:
    value = match["value"]
    if not value or value.startswith(REDACTED) or not is_secret_parameter(unquote(match["name"])):
        return match[0]
    end = value[len(value.rstrip(":,.)]}")) :]  # of the sentence
    return f"{match['lead']}{match['name']}={REDACTED}{end}"


def _without_encoded(match: re.Match[str]) -> str:
    if not is_secret_parameter(unquote(match["name"])):
        return match[0]
    return f"{match['lead']}{match['name']}%3D{REDACTED}"


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
    rf"|(?<![\w-])--?(?P<option>[A-Za-z][\w-]{{1,63}}+)(?:{_QUOTES}[ \t]{{0,4}},\s{{0,40}}|(?:[ \t]|\\\n){{1,8}})",
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
"""Text after `name:` in a sentence that is not its value."""

_OPTION_TEXT = re.compile(
    r"-.*|(?:[A-Z]+_)*(?:TEXT|NAME|VALUE|VARIABLE|TOKEN|PASSWORD|SECRET|KEY|FILE|PATH|STRING)(?:[=:][A-Z:]*)?"
    r"|(?:and|are|as|by|can|cannot|for|from|has|in|instead|is|must|needs|not|of|on|option|or|takes|that|the|to|was|with)"
    r"[,.:;]?"
)
"""Text after `--name` in a sentence that is not its value."""


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
