"""The manifest: the last file of a checkpoint to be written, and what makes it trustworthy."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from finetune.checkpoint.facts import RunFacts
from finetune.checkpoint.layout import MANIFEST
from finetune.errors import CheckpointError
from finetune.runtime import files

FORMAT_VERSION = 2

BLOCK_BYTES = 1 << 20  # stays in a core's cache between reading and digesting


@dataclass(frozen=True)
class FileFacts:
    """Size and SHA-256 of one file, as `sha256sum` prints it."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is of, and every other file in it."""

    step: int
    run: RunFacts
    metrics: Mapping[str, float]  # of an evaluation at this very step; empty without one
    state_sha256: str  # of parameters, optimizer state, step and samples, however they are laid out in files
    created: float  # unix seconds
    versions: Mapping[str, str]
    files: Mapping[str, FileFacts]  # by relative path, with forward slashes
    format_version: int = FORMAT_VERSION

    @property
    def size_bytes(self) -> int:
        """Return the size of all files, the manifest itself left out."""
        return sum(facts.size_bytes for facts in self.files.values())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, whole or not at all."""
    files.write_json(folder / MANIFEST, asdict(manifest), exact=True)


def read_manifest(folder: Path) -> Manifest:
    """Return the checkpoint's manifest; raises CheckpointError saying what is wrong with it."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder")
    if not path.is_file():
        raise CheckpointError(f"{folder}: there is no {MANIFEST}, so the checkpoint was never finished")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        _refuse_other_version(path, value)
        manifest = _parse(value)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error!r}") from error
    for name in manifest.files:
        _refuse_escape(path, name)
    return manifest


def file_facts(path: Path) -> FileFacts:
    """Return size and digest of the file, read from the disk in blocks."""
    digest = hashlib.sha256()
    size, block = 0, memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            size += count
    return FileFacts(size, digest.hexdigest())


def verified_by(manifest: Manifest, *, rank: int, world: int) -> list[str]:
    """Return the files that a rank verifies."""
    return sorted(manifest.files)[rank::world]


def first_problem(
    folder: Path,
    expected: Mapping[str, FileFacts],
    names: Iterable[str],
    *,
    facts: Callable[[Path], FileFacts] = file_facts,
) -> str | None:
    """Return what is wrong with the first bad one of the named files, or None when all are as the manifest says."""
    for name in names:
        path = folder / name
        if path.is_symlink() or not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != expected[name].size_bytes:
            return f"{name} has {size} bytes instead of {expected[name].size_bytes}"
        if facts(path) != expected[name]:
            return f"{name} does not have the digest it was written with"
    return None


def _refuse_other_version(path: Path, value: Mapping[str, Any]) -> None:
    if value["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: has format version {value['format_version']}; this finetune reads version {FORMAT_VERSION}. "
            f"Use the version of finetune that wrote it: {', '.join(f'{k} {v}' for k, v in value['versions'].items())}"
        )


def _parse(value: Mapping[str, Any]) -> Manifest:
    return Manifest(
        step=int(value["step"]),
        run=RunFacts(**{name: _texts(value["run"][name]) for name in ("identity", "settings", "origin")}),
        metrics={str(name): float(number) for name, number in value["metrics"].items()},
        state_sha256=str(value["state_sha256"]),
        created=float(value["created"]),
        versions=_texts(value["versions"]),
        files={name: FileFacts(int(facts["size_bytes"]), facts["sha256"]) for name, facts in value["files"].items()},
        format_version=int(value["format_version"]),
    )


def _texts(value: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): str(text) for name, text in value.items()}


def _refuse_escape(path: Path, name: str) -> None:
    """Refuse a member outside the folder: a manifest may come from a stranger."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or "\\" in name or ".." in parts or name == MANIFEST:
        raise CheckpointError(f"{path}: names the file {name!r}, which is not a plain relative name. Do not trust it.")
