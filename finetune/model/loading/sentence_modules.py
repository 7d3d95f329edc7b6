"""How a sentence-transformers model makes vectors of its states, as far as its files say."""

import json
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from finetune.config.sections.model import ModelSection
from finetune.model.loading.hub import is_local_path, resolve_name
from finetune.runtime.hub import is_offline

_POOLING_FILE = "1_Pooling/config.json"
_MODES = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "lasttoken": "pooling_mode_lasttoken",
}
_NAMES = {"lasttoken": "last_token"}


def pooling_warning(section: ModelSection, pooling: str) -> str | None:
    """Return a warning where the model was trained with another pooling than this; None where nothing says so."""
    usual = _pooling_of(section)
    if usual is None or usual == pooling:
        return None
    return (
        f"warning: task.embedding.pooling: `{section.name}` was trained with `{usual}` pooling, as its {_POOLING_FILE} "
        f"says, and this job pools by `{pooling}`. To go on from its vectors, write `pooling: {usual}`."
    )


def _pooling_of(section: ModelSection) -> str | None:
    place = _find(section)
    if place is None:
        return None
    try:
        found: Any = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict):
        return None
    old = [mode for mode, key in _MODES.items() if found.get(key)]
    modes: list[Any] = [found["pooling_mode"]] if "pooling_mode" in found else old
    is_one = len(modes) == 1 and isinstance(modes[0], str) and modes[0] in _MODES
    return _NAMES.get(modes[0], modes[0]) if is_one else None


def _find(section: ModelSection) -> Path | None:
    if section.name is None:
        return None
    if is_local_path(section.name):
        place = Path(resolve_name(section.name, key="model.name")) / _POOLING_FILE
        return place if place.is_file() else None
    try:
        found = cached_file(
            section.name,
            _POOLING_FILE,
            revision=section.revision,
            cache_dir=section.cache_folder,
            local_files_only=is_offline(),
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError:
        return None
    return None if found is None else Path(found)
