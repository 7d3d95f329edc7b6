"""Keys of a source that do nothing beside the others that are written there."""

import glob
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from finetune.config.paths import is_url
from finetune.config.rules.sources import is_share, places
from finetune.config.run_config import RunConfig
from finetune.config.sections.data import SourceSection, TrainedSourceSection

_HUB_KEYS = ("config", "revision", "split")
_PLACES = ("path", "name")
_WITH_IMAGES = ("image_classification", "vision_language_sft")
_SHARED_KEYS = tuple(name for name in SourceSection.model_fields if name not in _PLACES)
_MIXED_KEYS = tuple(name for name in TrainedSourceSection.model_fields if name not in _PLACES)


@dataclass(frozen=True)
class Effect:
    """A key, when it does something, and what to write so that it does."""

    key: str
    has_effect: Callable[[RunConfig], bool]
    needs: str


def source_effects(config: RunConfig) -> Iterator[Effect]:
    """Yield the keys of sources that may do nothing."""
    if config.data.train.mix:
        for name in _MIXED_KEYS:
            yield Effect(f"data.train.{name}", _never, "every source of `data.train.mix` has its own")
    for key, source in places(config):
        if is_share(source):
            for name in _SHARED_KEYS:
                yield Effect(f"{key}.{name}", _never, "the rows are those of `data.train`")
            continue
        for name in _HUB_KEYS:
            needs = f"rows at a `path` have no {name}, only a hub dataset has one"
            yield Effect(f"{key}.{name}", partial(_is_hub_dataset, source=source), needs)
        needs = "only a folder or a glob on this machine can lead elsewhere through a link"
        yield Effect(f"{key}.follow_links", partial(_may_meet_links, source=source), needs)
        yield Effect(f"{key}.image_root", _reads_images, f"only {' and '.join(_WITH_IMAGES)} read images")
    needs = "equal rows are never on both sides of `hash_fraction`"
    yield Effect("data.validation.exclude_from_train", _can_share_rows, needs)


def _never(config: RunConfig) -> bool:
    return False


def _is_hub_dataset(config: RunConfig, *, source: SourceSection) -> bool:
    return source.path is None


def _reads_images(config: RunConfig) -> bool:
    return config.task.name in _WITH_IMAGES


def _may_meet_links(config: RunConfig, *, source: SourceSection) -> bool:
    """Tell whether a folder, a glob, or rows that name images can lead elsewhere through a link."""
    path = source.path
    if _reads_images(config):
        return True
    if path is None or is_url(path):
        return False
    return glob.has_magic(path) or Path(path).is_dir()


def _can_share_rows(config: RunConfig) -> bool:
    return config.data.validation is None or config.data.validation.hash_fraction is None
