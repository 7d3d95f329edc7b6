"""A few of the job's real rows: the first ones, the longest ones, and a random sample."""

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

from finetune.commands.rehearse.report import Change
from finetune.config.run_config import RunConfig
from finetune.config.sections.data import SourceSection, ValidationSourceSection
from finetune.data.sources.files import Origin
from finetune.data.sources.local import ImageFolder
from finetune.data.sources.source import Source, find_origin, open_source
from finetune.runtime.optional import no_op

NUM_LONGEST, NUM_DRAWN = 16, 16
MAX_READ_ROWS, MAX_READ_SECONDS = 50_000, 20.0
MAX_ROWS, MAX_TAKEN = 5_000, 256
IMAGES_PER_CLASS = 16
_IMAGE_COLUMNS = ("image", "images")
_WRITTEN_AS_JSON = ("delimiter", "quotes", "encoding", "records", "name", "config", "revision", "take")


class _ReadRows(NamedTuple):
    """The chosen rows, the number of rows that were read, and whether those are all."""

    rows: list[Any]
    num_read: int
    is_whole: bool


def choose_rows(
    config: RunConfig, *, num_first: int, num_characters: int, folder: Path
) -> tuple[dict[str, Any], list[Change]]:
    """Write a few rows of every source into `folder`; return the overrides that read them, and a change per source.

    Of each source these are at least its first rows up to both numbers. Raises DataError if one cannot be read.
    """
    overrides: dict[str, Any] = {}
    changes: list[Change] = []
    train, validation = config.data.train, config.data.validation
    sources: dict[str, SourceSection] = {f"data.train.mix.{number}": own for number, own in enumerate(train.mix)}
    sources = sources or {"data.train": train}
    if isinstance(validation, ValidationSourceSection) and (validation.path or validation.name):
        sources["data.validation"] = validation
    for key, section in sources.items():
        source = open_source(section, key=key, log=no_op)
        origin = find_origin(section, key=key, log=no_op)
        if isinstance(origin, ImageFolder):
            values, rows = _copy_images(origin, folder / key)
        else:
            chosen = _read(source, num_first=num_first, num_characters=num_characters)
            values, rows = _write(chosen, section, origin, folder=folder / key)
        overrides |= {f"{key}.{name}": value for name, value in values.items()}
        changes.append(Change(key, str(section.path or section.name), rows, "enough for a few steps"))
    return overrides, changes


def _write(chosen: _ReadRows, section: SourceSection, origin: Origin, *, folder: Path) -> tuple[dict[str, Any], str]:
    """Write the rows of the source, and return the values of its section and a description of the rows."""
    rows, num_read = chosen.rows, chosen.num_read
    taken = min(len(rows), MAX_TAKEN)
    if section.has_positions or origin.class_names():
        why = "columns by position and class names do not allow a selection"
        return {"take": taken}, f"the first {taken:,} rows ({why})"
    folder.mkdir(parents=True)
    path = folder / "rows.jsonl"
    try:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    except (TypeError, ValueError, UnicodeEncodeError):
        path.unlink(missing_ok=True)
        return {"take": taken}, f"the first {taken:,} rows (JSON cannot represent them, so rows cannot be selected)"
    values: dict[str, Any] = {"path": str(path)}
    values |= {name: None for name in _WRITTEN_AS_JSON if getattr(section, name, None) is not None}
    if section.skip:
        values["skip"] = 0
    if section.split != "train":
        values["split"] = "train"
    folders = origin.image_folders()
    if section.image_root is None and folders and rows:
        columns = {*rows[0], *section.columns}
        if any(name in columns for name in _IMAGE_COLUMNS):
            values["image_root"] = str(folders[0])
    if len(rows) == num_read:
        return values, f"all {num_read:,} rows"
    read = f"{num_read:,} rows{'' if chosen.is_whole else ' (the beginning)'}"
    longest = max(map(_length, rows))
    return values, (
        f"{len(rows):,} of {read} read: the first, the {NUM_LONGEST} longest (up to {longest:,} characters), "
        f"{NUM_DRAWN} drawn"
    )


def _length(row: Any) -> int:
    return len(str(row))


def _read(source: Source, *, num_first: int, num_characters: int) -> _ReadRows:
    first: list[Any] = []
    longest: list[tuple[int, int, Any]] = []
    drawn: list[tuple[int, Any]] = []
    characters, number, draw, is_whole = 0, 0, random.Random(0), True
    deadline = time.monotonic() + MAX_READ_SECONDS
    for number, raw in enumerate(source.rows(), start=1):
        row = dict(raw.parse())
        if len(first) < MAX_ROWS and (len(first) < num_first or characters < num_characters):
            first.append(row)
            characters += _length(row)
            continue
        longest = sorted([*longest, (_length(row), number, row)], key=lambda entry: entry[:2])[-NUM_LONGEST:]
        replaced = draw.randrange(number)
        if len(drawn) < NUM_DRAWN:
            drawn.append((number, row))
        elif replaced < NUM_DRAWN:
            drawn[replaced] = (number, row)
        if number >= MAX_READ_ROWS or time.monotonic() > deadline:
            is_whole = False
            break
    others = {number: row for _, number, row in longest} | dict(drawn)
    return _ReadRows([*first, *(others[number] for number in sorted(others))], number, is_whole)


def _copy_images(origin: ImageFolder, folder: Path) -> tuple[dict[str, Any], str]:
    """Copy a few images of every class, spread over its files."""
    classes: dict[str, list[Path]] = {}
    for file in origin.files:
        classes.setdefault(file.parts[0], []).append(file)
    chosen = [
        file
        for files in classes.values()
        for file in files[:: max(len(files) // IMAGES_PER_CLASS, 1)][:IMAGES_PER_CLASS]
    ]
    for file in chosen:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin.folder / file, folder / file)
    return {"path": str(folder)}, f"{len(chosen):,} of {len(origin.files):,} images, of all {len(classes)} classes"
