"""The pooling of a sentence-transformers model, read from its files."""

import json
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from finetune.config.sections.model import ModelSection
from finetune.model.loading.hub import is_local_path, resolve_name
from finetune.runtime.hub import is_offline

_POOLING_FILE = "1_Pooling/config.json"
_NAMES = {"mean": "mean", "cls": "cls", "lasttoken": "last_token"}
"""This package's names of pooling by those of sentence-transformers 6."""
_OLDER_KEYS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last_token",
}


def pooling_warning(section: ModelSection, pooling: str) -> str | None:
    """Return a warning if the model's files name another pooling than this one."""
    trained = _pooling_of(section)
    if trained is None or trained == pooling:
        return None
    return (
        f"warning: task.embedding.pooling: `{section.name}` was trained with `{trained}` pooling, according to "
        f"its {_POOLING_FILE}, but this job uses `{pooling}`. To keep its vectors, write `pooling: {trained}`."
    )


def _pooling_of(section: ModelSection) -> str | None:
    """Return the pooling named in the model's files; None if there is none, several or an unknown one."""
    path = _pooling_file(section)
    if path is None:
        return None
    try:
        settings: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(settings, dict):
        return None
    if "pooling_mode" in settings:
        mode = settings["pooling_mode"]
        return _NAMES.get(mode) if isinstance(mode, str) else None
    names = [name for key, name in _OLDER_KEYS.items() if settings.get(key)]
    return names[0] if len(names) == 1 else None


def _pooling_file(section: ModelSection) -> Path | None:
    if section.name is None:
        return None
    if is_local_path(section.name):
        path = Path(resolve_name(section.name, key="model.name")) / _POOLING_FILE
        return path if path.is_file() else None
    try:
        cached = cached_file(
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
    return None if cached is None else Path(cached)
