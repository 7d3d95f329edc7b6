"""Names that a dataset of `datasets` gives to the whole numbers of a column (its `ClassLabel`)."""

import json
from collections.abc import Mapping
from typing import Any

ClassNames = Mapping[str, tuple[str, ...]]
"""From a column to the names of 0, 1, 2, ..."""

_METADATA = b"huggingface"


def class_names(features: Mapping[str, Any]) -> ClassNames:
    """Return the columns of whole numbers, or of lists of them, that have names.

    `features` is what `datasets` writes of its features: `{"label": {"names": [...], "_type": "ClassLabel"}}`.
    """
    found = {column: _names(described) for column, described in features.items()}
    return {column: names for column, names in found.items() if names}


def class_names_in(metadata: Mapping[bytes, bytes] | None) -> ClassNames:
    """Return those that stand in the metadata of a Parquet or Arrow schema; none where nothing can be read there."""
    try:
        written = json.loads((metadata or {})[_METADATA])
        return class_names(written["info"]["features"])
    except (KeyError, ValueError, TypeError, AttributeError):  # anybody may write anything there
        return {}


def _names(described: Any) -> tuple[str, ...]:
    """Return the names in a column's description; lists are `{"feature": ..., "_type": "List"}` or, of old, `[...]`."""
    if isinstance(described, list) and len(described) == 1:
        return _names(described[0])
    if not isinstance(described, Mapping):
        return ()
    if described.get("_type") == "ClassLabel":
        return tuple(map(str, described.get("names") or ()))
    return _names(described.get("feature"))
