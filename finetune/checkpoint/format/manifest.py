"""The manifest, the last file of a checkpoint that is written, with size and digest of all others. No torch."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from finetune import __version__
from finetune.checkpoint.format.layout import MANIFEST, step_of
from finetune.errors import CheckpointError
from finetune.runtime.files import atomic
from finetune.runtime.files.read import first_problem as json_problem
from finetune.runtime.files.read import parse_json, read_regular
from finetune.runtime.progress import MAX_STEPS


@dataclass(frozen=True)
class RunFingerprint:
    """The settings of the run that wrote a checkpoint, as text for messages."""

    identity: Mapping[str, str]  # settings that change the training result: a resumed run must have the same
    settings: Mapping[str, str]  # other settings: they may differ, and differences are logged
    origin: Mapping[str, str]  # `strategy` and `processes` of the run: a resumed run may have others


FORMAT_VERSION = 2

MANIFEST_DIGEST_KEY = "sha256"
"""The manifest's key for its own digest; the oldest manifests have none."""

BLOCK_BYTES = 1 << 20  # stays in a core's cache between reading and digesting

_MAX_BYTES = 64 << 20
_MAX_CREATED = 1e11  # unix seconds, the year 5138: anything later is not a date

STRICT: ConfigDict = ConfigDict(strict=True, extra="forbid")
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_StringMap = dict[str, str]


class OtherFormatError(CheckpointError):
    """The checkpoint has another format version; it is not damaged and must not be renamed or deleted."""


@dataclass(frozen=True)
class FileChecksum:
    """Size and SHA-256 of one file, as `sha256sum` prints it."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint, with the checksums of all other files."""

    step: int
    run: RunFingerprint
    metrics: Mapping[str, float]  # of an evaluation at exactly this step; empty without one
    state_sha256: str  # of parameters, optimizer state, step and samples, independent of files
    created: float  # unix seconds
    versions: Mapping[str, str]
    files: Mapping[str, FileChecksum]  # by relative path, with forward slashes
    format_version: int = FORMAT_VERSION

    @property
    def size_bytes(self) -> int:
        """Return the size of all files except the manifest itself."""
        return sum(checksum.size_bytes for checksum in self.files.values())


@with_config(STRICT)
class _StoredFile(TypedDict):
    size_bytes: Annotated[int, Field(ge=0, lt=2**63)]
    sha256: Digest


@with_config(STRICT)
class _StoredRun(TypedDict):
    identity: _StringMap
    settings: _StringMap
    origin: _StringMap


@with_config(STRICT)
class _StoredManifest(TypedDict):
    step: Annotated[int, Field(ge=0, le=MAX_STEPS)]
    run: _StoredRun
    metrics: dict[str, float]
    state_sha256: Annotated[str, Field(pattern="^[0-9a-f]{0,64}$")]
    created: Annotated[float, Field(ge=0, le=_MAX_CREATED, allow_inf_nan=False)]
    versions: _StringMap
    files: dict[str, _StoredFile]
    format_version: int


_SCHEMA = TypeAdapter(_StoredManifest)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest atomically, with a digest of its own content."""
    value = asdict(manifest)
    atomic.write_json(folder / MANIFEST, value | {MANIFEST_DIGEST_KEY: manifest_digest(value)}, exact=True)


def manifest_digest(value: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the manifest's JSON without its own digest: keys sorted, no whitespace between tokens.

    It is the same in every format version, so that damage is distinguished from an unknown version.
    """
    rest = {name: item for name, item in value.items() if name != MANIFEST_DIGEST_KEY}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Return the checkpoint's manifest; raises CheckpointError with its problem.

    The subclass OtherFormatError means that the manifest is intact but has another format version: do not change it.
    """
    path = folder / MANIFEST
    try:
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder")
        if not path.is_file():
            raise CheckpointError(f"{folder}: has no {MANIFEST}, so the checkpoint was never finished")
        return parse_manifest(read_regular(path, max_bytes=_MAX_BYTES), path=path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def read_manifest_of_step(path: Path) -> Manifest:
    """Return the manifest; raises CheckpointError also if the folder is named after another step."""
    manifest, named = read_manifest(path), step_of(path)
    if named not in (None, manifest.step):
        raise CheckpointError(f"{path}: the folder is named step {named}, but its manifest says step {manifest.step}")
    return manifest


def parse_manifest(content: bytes, *, path: Path) -> Manifest:
    """Parse the content of a manifest file; raises as `read_manifest` does."""
    try:
        value = parse_json(content)
        if not isinstance(value, dict):
            raise ValueError("it is not a JSON object")
        if MANIFEST_DIGEST_KEY in value and value[MANIFEST_DIGEST_KEY] != manifest_digest(value):
            raise CheckpointError(f"{path}: does not match its digest")
        _refuse_other_format(path, value)
        stored = _SCHEMA.validate_python({name: item for name, item in value.items() if name != MANIFEST_DIGEST_KEY})
    except ValidationError as error:
        raise CheckpointError(f"{path}: cannot be read: {json_problem(error)}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    for name in stored["files"]:
        # A manifest may come from an untrusted source: no file outside of the folder.
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or "\\" in name or ".." in parts or name == MANIFEST:
            raise CheckpointError(
                f"{path}: lists the file {name!r}, which is not a plain relative path. Do not trust this checkpoint."
            )
    return _manifest(stored)


def file_checksum(path: Path) -> FileChecksum:
    """Return size and SHA-256 of the file, read in blocks."""
    digest = hashlib.sha256()
    size, block = 0, memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            size += count
    return FileChecksum(size, digest.hexdigest())


def files_to_verify(manifest: Manifest, *, rank: int, world: int) -> list[str]:
    """Return the names of the files that this rank verifies."""
    return sorted(manifest.files)[rank::world]


def first_file_problem(
    folder: Path,
    expected: Mapping[str, FileChecksum],
    names: Iterable[str],
    *,
    checksum_of: Callable[[Path], FileChecksum] = file_checksum,
) -> str | None:
    """Return the problem of the first bad file; None if all match the manifest."""
    for name in names:
        path = folder / name
        if path.is_symlink() or not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != expected[name].size_bytes:
            return f"{name} has {size} bytes instead of {expected[name].size_bytes}"
        if checksum_of(path) != expected[name]:
            return f"{name} does not match its digest"
    return None


def _refuse_other_format(path: Path, value: Mapping[str, Any]) -> None:
    number = value.get("format_version")
    if not isinstance(number, int) or isinstance(number, bool):
        raise ValueError("format_version: missing, or not a number")
    if number != FORMAT_VERSION:
        versions = value.get("versions")
        wrote = str(versions.get("finetune", "")) if isinstance(versions, dict) else ""
        raise OtherFormatError(
            f"{path.parent}: a checkpoint of format {number}, written by finetune {wrote or 'of an unknown version'}; "
            f"finetune {__version__} reads format {FORMAT_VERSION}. Nothing was changed. Install finetune "
            f"{wrote or 'in the version that wrote it'}, or set checkpoint.resume to a checkpoint of format "
            f"{FORMAT_VERSION}."
        )


def _manifest(stored: Mapping[str, Any]) -> Manifest:
    run, members = stored["run"], stored["files"]
    parsed = {"run": RunFingerprint(**run), "files": {name: FileChecksum(**stored) for name, stored in members.items()}}
    return Manifest(**{**stored, **parsed})
