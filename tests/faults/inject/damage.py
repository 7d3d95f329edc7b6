"""Files that are damaged while nothing runs, or as soon as they are written."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.faults.evidence import EVENTS, STATUS, Run
from tests.faults.schedule import Fault

_TORN_LINE = b'{"event": "StepTaken", "time": 17'


def damage(fault: Fault, run: Run, *, cache: Path, draw: random.Random) -> Path | None:
    """Damage the file that the fault names; return it, or None where it does not exist."""
    path = _path(fault.target, run, cache=cache, draw=draw)
    if path is None or not path.is_file():
        return None
    _MANNERS[fault.how](path, draw)
    if path.is_relative_to(run.folder / "checkpoints"):
        run.damaged.add(path.relative_to(run.folder / "checkpoints").parts[0])
    return path


def _path(name: str, run: Run, *, cache: Path, draw: random.Random) -> Path | None:
    if name in (EVENTS, STATUS, "environment.json"):
        return run.folder / name
    if name == "token cache":
        return _any_file(cache / "prepared", draw)
    if name == "inputs":
        return _any_file(run.folder / "inputs", draw)
    newest = run.newest_whole()
    if newest is None:
        return None
    return newest / name if name.endswith(".json") else _any_file(newest / name, draw)


def _any_file(folder: Path, draw: random.Random) -> Path | None:
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 0)
    return draw.choice(found) if found else None


def _flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def _truncate(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content))] if content else b"")


def _garbage(path: Path, draw: random.Random) -> None:
    path.write_bytes(draw.randbytes(max(1, path.stat().st_size)))


def _tear(path: Path, draw: random.Random) -> None:
    with path.open("ab") as file:
        file.write(_TORN_LINE[: draw.randrange(1, len(_TORN_LINE))])


_MANNERS: Mapping[str, Callable[[Path, random.Random], object]] = {
    "flip": _flip,
    "truncate": _truncate,
    "delete": lambda path, draw: path.unlink(),
    "empty": lambda path, draw: path.write_bytes(b""),
    "garbage": _garbage,
    "half a line": _tear,
}
