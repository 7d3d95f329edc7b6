"""Reads a table that users may edit: a YAML file of named entries."""

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from finetune.errors import UserError


def read_table(path: Path) -> dict[str, Any]:
    """Return the entries of the file by name; raises UserError if it cannot be read or is not a mapping."""
    try:
        values = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"{path}: this table cannot be read: {first}.") from None
    if not isinstance(values, dict) or not values:
        raise UserError(f"{path}: a table must be a mapping of names to entries.")
    return {str(name): entry for name, entry in values.items()}
