"""Secrets in URLs: user and password before the host, and parameters that are a signature or hold a key."""

import re
from collections.abc import Callable, Iterator
from urllib.parse import unquote

REDACTED = "[redacted]"

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,15}://[^\s\"'<>`]+")
_USER = re.compile(r"^(?P<user>[^/?#@]*|[^/?#@:]*:(?!\d{1,5}(?:[/?#]|$))[^?#@\s]*)@")
"""All before the `@`; a password may hold slashes, and what follows a port is none."""

_CONTAINERS = ("hf", "abfs", "abfss", "wasb", "wasbs")
"""Schemes in which a word before an `@` is a container or a repository, and no user."""

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
"""What comes with a signature and changes with it, too."""


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
    kept = [part for part in parts if not (is_secret_parameter(_name(part)) or _is_signing(_name(part), parts))]
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
    """Return the address alone, of a URL; a path is returned as it is."""
    return re.split(r"[?#]", url, maxsplit=1)[0] if re.match(r"https?://", url, re.IGNORECASE) else url


def _redacted_url(match: re.Match[str]) -> str:
    scheme, _, rest = match[0].partition("://")
    rest = _USER.sub(_redacted_user(scheme), rest)
    if "=" in rest:
        rest = _PARAMETER.sub(_without_value, rest)
    return f"{scheme}://{rest}"


def _redacted_user(scheme: str) -> Callable[[re.Match[str]], str]:
    def redacted(match: re.Match[str]) -> str:
        user = match["user"]
        is_public = user == "git" or REDACTED in user or (scheme.lower() in _CONTAINERS and ":" not in user)
        return match[0] if is_public else f"{REDACTED}@"

    return redacted


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


def _name(part: str) -> str:
    return unquote(part.partition("=")[0])


def _is_signing(name: str, parts: list[str]) -> bool:
    """Return whether the parameter belongs to a signature; without one in the URL, it means something else."""
    return bool(_SIGNING_PARAMETER.search(name)) and any(is_secret_parameter(_name(part)) for part in parts)
