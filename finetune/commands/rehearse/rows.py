"""A few of the job's real rows: the first ones, the longest ones, and some drawn from all that were read."""

import json
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.commands.rehearse.shrink import Change
from finetune.config.run_config import RunConfig
from finetune.config.sections.data import SourceSection, ValidationSourceSection
from finetune.data.rows import RawRow
from finetune.data.sources.local import ImageFolder
from finetune.data.sources.source import Source, find_origin, open_source

NUM_LONGEST, NUM_DRAWN = 16, 16
MAX_READ_ROWS, MAX_READ_SECONDS = 50_000, 20.0
MAX_ROWS = 5_000
IMAGES_PER_CLASS = 16
_IMAGE_COLUMNS = ("image", "images")
_WRITTEN_AS_JSON = ("delimiter", "quotes", "encoding", "records", "name", "config", "revision", "take")


@dataclass(frozen=True)
class Wanted:
    """How many first rows are needed at least, and how many characters they have together."""

    num_rows: int
    num_characters: int


@dataclass(frozen=True)
class ChosenRows:
    """Overrides that make the job read these rows, what they change, and what was read."""

    overrides: dict[str, Any]
    changes: tuple[Change, ...]
    lines: tuple[str, ...]


def choose_rows(config: RunConfig, *, wanted: Wanted, folder: Path) -> ChosenRows:
    """Write a few rows of every source of the job into `folder`; raises DataError where a source cannot be read."""
    overrides: dict[str, Any] = {}
    changes: list[Change] = []
    lines: list[str] = []
    for key, section in _sources(config):
        source = open_source(section, key=key, log=lambda line: None)
        chosen = _chosen(source, section, wanted=wanted, folder=folder / key)
        overrides |= {f"{key}.{name}": value for name, value in chosen.values.items()}
        changes.append(Change(key, chosen.was, chosen.now, "a few steps need no more"))
        lines.append(f"{key}: {chosen.now}")
    validation = config.data.validation
    for name in ("fraction", "hash_fraction"):
        written = getattr(validation, name, None)
        if written is not None and written < 0.1:
            overrides[f"data.validation.{name}"] = 0.1
            changes.append(Change(f"data.validation.{name}", written, 0.1, "of so few rows, some must remain"))
    return ChosenRows(overrides, tuple(changes), tuple(lines))


@dataclass(frozen=True)
class _Chosen:
    values: dict[str, Any]
    was: str
    now: str


def _sources(config: RunConfig) -> Iterator[tuple[str, SourceSection]]:
    train, validation = config.data.train, config.data.validation
    mixed: Sequence[tuple[str, SourceSection]] = [(f"data.train.mix.{n}", each) for n, each in enumerate(train.mix)]
    yield from mixed or [("data.train", train)]
    if isinstance(validation, ValidationSourceSection) and (validation.path or validation.name):
        yield "data.validation", validation


def _chosen(source: Source, section: SourceSection, *, wanted: Wanted, folder: Path) -> _Chosen:
    origin = find_origin(section, key=source.key, log=lambda line: None)
    was = str(section.path or section.name)
    if isinstance(origin, ImageFolder):
        return _copied_images(origin, folder, was=was)
    rows, num_read, is_whole = _read(source, wanted)
    read = f"{num_read:,} rows{'' if is_whole else ', the beginning,'}"
    if section.has_positions or origin.class_names():
        return _first_rows(rows, was=was, why="only as columns by position or class names allow: none of the longest")
    folder.mkdir(parents=True)
    path = folder / "rows.jsonl"
    try:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    except (TypeError, ValueError, UnicodeEncodeError):
        path.unlink(missing_ok=True)
        return _first_rows(rows, was=was, why="they hold more than JSON can: none of the longest")
    values: dict[str, Any] = {"path": str(path)}
    values |= {name: None for name in _WRITTEN_AS_JSON if getattr(section, name, None) is not None}
    values |= {"skip": 0} if section.skip else {}
    values |= {"split": "train"} if section.split != "train" else {}
    folders = origin.image_folders()
    if section.image_root is None and folders and any(_has_image(row, section) for row in rows[:1]):
        values["image_root"] = str(folders[0])
    longest = max(map(_length, rows))
    now = (
        f"{len(rows):,} of {read} read: the first, the {NUM_LONGEST} longest (up to {longest:,} characters), "
        f"{NUM_DRAWN} drawn"
    )
    return _Chosen(values, was, now if len(rows) < num_read else f"all {num_read:,} rows")


def _has_image(row: Any, section: SourceSection) -> bool:
    columns = {*row, *section.columns}
    return any(name in columns for name in _IMAGE_COLUMNS)


def _first_rows(rows: Sequence[Any], *, was: str, why: str) -> _Chosen:
    number = min(len(rows), 256)
    return _Chosen({"take": number}, was, f"the first {number:,} rows ({why})")


def _length(row: Any) -> int:
    return len(str(row))


def _read(source: Source, wanted: Wanted) -> tuple[list[Any], int, bool]:
    """Return the chosen rows, how many were read, and whether those are all."""
    first: list[Any] = []
    longest: list[tuple[int, int, Any]] = []
    drawn: list[tuple[int, Any]] = []
    characters, number, draw = 0, 0, random.Random(0)
    deadline = time.monotonic() + MAX_READ_SECONDS
    for number, raw in enumerate(source.rows(), start=1):
        row = _parsed(raw)
        if len(first) < MAX_ROWS and (len(first) < wanted.num_rows or characters < wanted.num_characters):
            first.append(row)
            characters += _length(row)
            continue
        longest = sorted([*longest, (_length(row), number, row)], key=lambda each: each[:2])[-NUM_LONGEST:]
        place = draw.randrange(number)
        if len(drawn) < NUM_DRAWN:
            drawn.append((number, row))
        elif place < NUM_DRAWN:
            drawn[place] = (number, row)
        if number >= MAX_READ_ROWS or time.monotonic() > deadline:
            return _joined(first, longest, drawn), number, False
    return _joined(first, longest, drawn), number, True


def _parsed(raw: RawRow) -> Any:
    return dict(raw.parse())


def _joined(first: list[Any], longest: list[tuple[int, int, Any]], drawn: list[tuple[int, Any]]) -> list[Any]:
    others = {number: row for _, number, row in longest} | dict(drawn)
    return [*first, *(others[number] for number in sorted(others))]


def _copied_images(origin: ImageFolder, folder: Path, *, was: str) -> _Chosen:
    """Copy a few images of every class, spread over its files."""
    classes: dict[str, list[Path]] = {}
    for file in origin.files:
        classes.setdefault(file.parts[0], []).append(file)
    number = 0
    for files in classes.values():
        for file in files[:: max(len(files) // IMAGES_PER_CLASS, 1)][:IMAGES_PER_CLASS]:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(origin.folder / file, folder / file)
            number += 1
    now = f"{number:,} of {len(origin.files):,} images, of all {len(classes)} classes"
    return _Chosen({"path": str(folder)}, was, now)
