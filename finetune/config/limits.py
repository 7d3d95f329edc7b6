"""Limits on the size of a job file: larger than any job needs, small enough to check within seconds.

Reading YAML takes about 30 microseconds per value, and the checks take a similar time.
"""

import re

MAX_FILE_BYTES = 1 << 20
"""Size of a job file."""

MAX_VALUES = 25_000
"""Values and keys of a file or an override, aliases expanded: 20,000 names of classes are fine."""

MAX_RESOLVED_VALUES = 30_000
"""Values and keys of a `resolved.yaml`, which includes all defaults."""

MAX_DEPTH = 32
"""Nesting depth of lists and sections."""

MAX_TEXT_LENGTH = 4 << 20
"""Characters of all texts and numbers together, aliases expanded."""

MAX_KEY_LENGTH = 1_000
"""Characters of a dotted key."""

MAX_DIGITS = 100
"""Characters of a number."""

MAX_OVERRIDES = 1_000
"""Number of `--set` options of one command."""

MAX_OVERRIDES_LENGTH = 1 << 18
"""Characters of all overrides together."""

MAX_LISTED = 50
"""Maximum number of listed problems; the others are only counted."""

TOO_DEEP = f"lists and sections are nested deeper than {MAX_DEPTH} levels here. No key needs that: flatten them."
TOO_MANY_VALUES = f"there are more than {MAX_VALUES:,} keys and values up to here, aliases expanded. Shorten the lists."
TOO_MUCH_TEXT = (
    f"there are more than {MAX_TEXT_LENGTH:,} characters of text up to here, aliases expanded. Shorten the texts."
)
TOO_LARGE_NUMBER = f"the number has more than {MAX_DIGITS} digits. Write a smaller one."


def invalid_characters(text: str) -> str | None:
    """Return the problem of a text that contains a NUL or cannot be encoded as UTF-8; None if it has none."""
    match = _UNWRITABLE.search(text)
    if match is None:
        return None
    if match[0] == "\0":
        return "this text contains a NUL character. Remove it."
    return "this text contains an unpaired surrogate, which UTF-8 cannot encode. Remove it."


_UNWRITABLE = re.compile("[\0\ud800-\udfff]")
