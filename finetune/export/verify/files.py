"""The files of an exported folder but its weights: which there are, what is in them, and the values of settings."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

_MAX_NAMED = 3
_MAX_SHOWN = 80
_NOT_COMPARED = {"architectures", "dtype", "transformers_version", "tie_word_embeddings", "truncation", "padding"}
"""Settings that saving, a merge or the tokenizer's last call changes; that ties are right, the tensors show."""


def file_problems(folder: Path, written: Mapping[str, str | None], settings: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with the files; `written` has their digests, `settings` JSON texts from memory by name."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    other = [name for name in written.keys() & found.keys() if file_digest(found[name]) != written[name]]
    for names, what in (
        (written.keys() - found.keys(), "missing, although the export wrote it"),
        (found.keys() - written.keys(), "in the folder, although the export did not write it"),
        (other, "not as the export wrote it"),
    ):
        yield from (f"{name} is {what}." for name in sorted(names)[:_MAX_NAMED])
    for name in settings.keys() & found.keys():
        try:
            loaded, expected = _values(found[name].read_text(encoding="utf-8")), _values(settings[name])
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
    """Return a digest of the file; None of weights, whose tensors are compared."""
    return None if path.suffix == ".safetensors" else hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _values(text: str) -> dict[str, str]:
    """Return the values in a JSON file as texts, by key or `key.name`; long ones as their length and digest."""
    values: dict[str, str] = {}
    for key, value in json.loads(text).items():
        inner = {f"{key}.{name}": each for name, each in value.items()} if isinstance(value, dict) else {key: value}
        for name, each in inner.items():
            if _NOT_COMPARED.isdisjoint(name.split(".")):
                written = json.dumps(each, sort_keys=True)
                digest = hashlib.sha256(written.encode()).hexdigest()[:8]
                values[name] = written if len(written) <= _MAX_SHOWN else f"{len(each)} entries with digest {digest}"
    return values
