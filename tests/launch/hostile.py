"""Names and values that break a text in which they are not quoted."""

import pytest

from finetune.runtime.text.terminal import escape_controls

WORST = 'it\'s "a" $(touch PWNED) `touch PWNED` $$(HOME) ${HOME} {{ x }} %j; #*'
"""Most of what is special to shells, to Slurm, to Kubernetes and to templates, in a name that a file can have."""

HOSTILE = (
    WORST,
    "plain",
    "two words",
    " leading and trailing ",
    "it's",
    'a "quoted" word',
    "$(touch PWNED)",
    "`touch PWNED`",
    "${HOME}",
    "$$ $(HOME) $$(HOME) $$$(HOME)$",
    "a;touch PWNED",
    "a && touch PWNED",
    "a | touch PWNED",
    "a > PWNED",
    "two\nlines",
    "ends with a line\n",
    "EOF\ntouch PWNED\n",
    "a\\b\\",
    "#comment",
    "- list",
    "key: value",
    "{{ jinja }} {% for %}",
    "!tag &anchor *alias",
    "%j %t %%",
    "yes",
    "010",
    "1e3",
    "null",
    "~",
    "",
    "=",
    "tab\there",
    "ümläut 日本語 🙂",
    "--option",
    "-n",
    "*",
    "[a-z]?",
    "a\rb",
    "\x07bell",
    "--- \n...",
    "'''",
    "\u2028 separator",
    "x" * 3000,
)

HIDDEN = frozenset(word for word in HOSTILE if escape_controls(word) != word)
"""Those with characters that nobody sees, or that act on a terminal: no job file holds them."""

NAMES = [
    WORST,
    *(pytest.param(word, marks=pytest.mark.full) for word in HOSTILE[1:] if len(word) < 100 and word.strip()),
]
"""Those that a file can be named after; all but the worst are part of the whole suite."""
