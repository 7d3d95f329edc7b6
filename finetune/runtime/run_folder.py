"""What the names in a run's folder have to be: a folder where we write files, or a pipe, would stop a run midway."""

import os
import stat
from pathlib import Path

from finetune.errors import UserError

FILES = (
    *(".writer.lock", ".status.lock", "STOP", "status.json", "events.jsonl", "config.yaml", "resolved.yaml"),
    *("environment.json", "audit.json", "final.json"),
)
FOLDERS = ("checkpoints", "samples", "inputs", "final", "hang")

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def require_plain_names(folder: Path) -> None:
    """Raise UserError where one of a run's own names is taken by something else than the run puts there."""
    problems = [
        problem
        for names, wanted in ((FILES, stat.S_IFREG), (FOLDERS, stat.S_IFDIR))
        for name in names
        if (problem := _problem(folder / name, wanted)) is not None
    ]
    if problems:
        raise UserError(f"run.folder: {'; '.join(problems)}. Move or delete it, or write another run.folder.")


def _problem(path: Path, wanted: int) -> str | None:
    try:
        found = stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        return f"{path} is a link to nothing" if os.path.lexists(path) else None
    except OSError as error:
        return f"{path} cannot be looked at ({error.strerror})"
    return None if found == wanted else f"{path} is {_KINDS.get(found, 'something else')} and not {_KINDS[wanted]}"
