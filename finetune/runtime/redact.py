"""Secrets stay out of what a run writes down: environment.json, events.jsonl, trackers."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "[redacted]"

_SECRET_VARIABLE = re.compile(
    r"(^|_)(API_?KEY|AUTH|AUTHORIZATION|BEARER|COOKIE|CREDENTIALS?|KEYS?|PASS|PASSPHRASE|PASSWD|PASSWORD|PAT|PWD|SECRETS?|TOKENS?)(_|$)",
    re.IGNORECASE,
)

_SECRET_NAME = re.compile(
    r"(^|_)(password|passwd|passphrase|secrets?|credentials?|bearer)($|_)"
    r"|(api|access|private|secret|auth|signing|encryption)_?keys?$"
    r"|(^|_)(auth|access|api|hf|hub|refresh|session|wandb|github|gitlab|secret|private|use_auth)_?tokens?$"
    r"|^(token|authorization)$",
    re.IGNORECASE,
)
_SECRET_SHAPE = re.compile(
    r"\b(hf_|api_org_|sk-|ghp_|gho_|ghs_|github_pat_|glpat-|xox[abpr]-|AKIA|ASIA)[A-Za-z0-9_-]{12,}|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+"
)
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")


def redacted_text(text: str) -> str:
    """Return the text without what has the shape of a known access token or of a password in a URL."""
    return _URL_PASSWORD.sub(REDACTED, _SECRET_SHAPE.sub(REDACTED, text))


def redacted_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables, with the value of each whose name speaks of a secret left out."""
    return {
        name: REDACTED if _SECRET_VARIABLE.search(name) else redacted_text(value) for name, value in variables.items()
    }


def redacted_config(value: Any, *, name: str = "") -> Any:
    """Return nested plain values with texts under secret names left out; `pad_token` and `tokens: 1000` are none."""
    if isinstance(value, Mapping):
        return {key: redacted_config(item, name=str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted_config(item, name=name) for item in value]
    if isinstance(value, str):
        return REDACTED if is_secret_name(name) and value else redacted_text(value)
    return value


def redacted_command(words: Sequence[str]) -> list[str]:
    """Return a command line with the values of secret options left out: `--hub-token X`, `--set a.password=X`."""
    cleaned: list[str] = []
    hides_next = False
    for word in words:
        cleaned.append(REDACTED if hides_next else _redacted_word(word))
        hides_next = word.startswith("-") and "=" not in word and is_secret_name(word)
    return cleaned


def is_secret_name(name: str) -> bool:
    """Tell whether a key or option of this name holds a secret; of a dotted key, the last part decides."""
    return bool(_SECRET_NAME.search(name.lstrip("-").rsplit(".", 1)[-1].replace("-", "_")))


def _redacted_word(word: str) -> str:
    *names, _ = word.split("=")  # `--set=a.password=X` has two names
    for index, name in enumerate(names, start=1):
        if is_secret_name(name):
            return f"{'='.join(names[:index])}={REDACTED}"
    return redacted_text(word)
