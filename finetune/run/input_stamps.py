"""By what it is told, without reading them, that the files from which a run learns have not been touched since."""

import os
from collections.abc import Iterator
from pathlib import Path

from finetune.config.paths import is_path, is_url
from finetune.config.rules.sources import sources
from finetune.config.run_config import RunConfig

Stamps = dict[str, list[int]]
"""Of each file, by its path: inode, size, and the times in nanoseconds when it was written and changed."""

_MOST_FILES = 1_000
_WITH_IMAGES = ("image_classification", "vision_language_sft")
"""Tasks whose rows name other files."""


def input_stamps(config: RunConfig, *, before: float) -> Stamps | None:
    """Return the stamps of all files that decide rows and tokens; None where not all of them are known.

    That is so where something comes from a hub or a bucket, where rows name other files, where there are very many, and
    where one was changed after `before` (unix seconds): what was read then may have been another.
    """
    if config.task.name in _WITH_IMAGES or None in (places := list(_places(config))):
        return None
    stamps: Stamps = {}
    try:
        for path in (each for place in places if place is not None for each in _files(place)):
            found = path.stat()
            if max(found.st_mtime, found.st_ctime) >= before or len(stamps) >= _MOST_FILES:
                return None
            stamps[str(path)] = [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
    except OSError:
        return None
    return stamps


def is_untouched(config: RunConfig, *, since: float) -> bool:
    """Tell whether no file on this machine that the run learns from, or on top of, was changed since (unix seconds).

    What lies in a hub or a bucket is taken to be as it was.
    """
    places = [place for place in _places(config) if place is not None]
    distillation = config.task.distillation
    others = (config.model.name, config.model.adapter, None if distillation is None else distillation.teacher)
    places += [Path(name) for name in others if name is not None and is_path(name)]
    try:
        found = [each.stat() for place in places for each in _files(place)]
    except OSError:
        return False
    return all(max(each.st_mtime, each.st_ctime) < since for each in found)


def _places(config: RunConfig) -> Iterator[Path | None]:
    """Yield files and folders that decide rows and tokens; None for what lies elsewhere."""
    for _, source in sources(config):
        is_here = source.path is not None and not is_url(source.path) and Path(source.path).exists()
        yield Path(str(source.path)) if is_here else None  # a pattern is not followed
    template, tokenizer = config.data.chat_template, config.model.tokenizer
    if template is not None and is_path(template):
        yield Path(template)
    name = tokenizer.name if tokenizer is not None else config.model.name
    if name is not None:
        yield Path(name) if is_path(name) else None


def _files(place: Path) -> Iterator[Path]:
    if not place.is_dir():
        yield place
        return
    for folder, _, names in os.walk(place):
        yield from (Path(folder) / name for name in names)
