"""JSON files of sentence-transformers next to a model: kept when its folder is exported again."""

import json
from pathlib import Path
from typing import Any

_MODULES = "modules.json"
_FILES = (_MODULES, "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json")


def read_sentence_files(folder: Path) -> dict[str, Any]:
    """Return the files of the folder by relative path; none where sentence-transformers does not know the model."""
    if not (folder / _MODULES).is_file():
        return {}
    return {
        name: json.loads((folder / name).read_text(encoding="utf-8")) for name in _FILES if (folder / name).is_file()
    }
