"""Checks of an exported folder's files other than weights: their names, contents, and settings."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_MAX_NAMED = 3
_MAX_SHOWN = 80
_NOT_COMPARED = {"architectures", "dtype", "transformers_version", "tie_word_embeddings", "truncation", "padding"}
"""Settings changed by saving, a merge or the tokenizer's last call; ties are verified through the tensors."""


def file_problems(folder: Path, written: Mapping[str, str | None], settings: Mapping[str, str]) -> Iterator[str]:
    """Yield the problems of the files; `written` has their digests, `settings` the expected JSON texts, by name."""
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    changed = [name for name in written.keys() & paths.keys() if file_digest(paths[name]) != written[name]]
    for names, problem in (
        (written.keys() - paths.keys(), "is missing, although the export wrote it"),
        (paths.keys() - written.keys(), "is in the folder, although the export did not write it"),
        (changed, "has changed since the export wrote it"),
    ):
        yield from (f"{name} {problem}." for name in sorted(names)[:_MAX_NAMED])
    for name in settings.keys() & paths.keys():
        try:
            loaded, expected = _values(paths[name].read_text(encoding="utf-8")), _values(settings[name])
        except (ValueError, AttributeError) as error:
            yield f"{name} is not a JSON object ({error})."
            continue
        wrong = [
            f"`{key}` is {loaded.get(key)} instead of {expected.get(key)}"
            for key in sorted(loaded.keys() | expected.keys())
            if loaded.get(key) != expected.get(key)
        ]
        if wrong:
            yield f"{name}: {', '.join(wrong[:_MAX_NAMED])}."


def file_digest(path: Path) -> str | None:
    """Return a digest of the file; None for weights, whose tensors are compared."""
    return None if path.suffix == ".safetensors" else hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _values(text: str) -> dict[str, str]:
    """Return the values in a JSON file as texts, by key or `key.name`; long ones as their length and digest."""
    flat: dict[str, Any] = {}
    for key, value in json.loads(text).items():
        flat |= {f"{key}.{name}": inner for name, inner in value.items()} if isinstance(value, dict) else {key: value}
    values: dict[str, str] = {}
    for name, value in flat.items():
        if _NOT_COMPARED.isdisjoint(name.split(".")):
            written = json.dumps(value, sort_keys=True)
            digest = hashlib.sha256(written.encode()).hexdigest()[:8]
            values[name] = written if len(written) <= _MAX_SHOWN else f"{len(value)} entries with digest {digest}"
    return values
