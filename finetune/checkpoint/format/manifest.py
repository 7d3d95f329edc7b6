"""The JSON files of a checkpoint, checked by schemas: index, scalars, progress, and the manifest. No torch.

The manifest is written last, with size and digest of all other files.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from safetensors import SafetensorError, safe_open
from typing_extensions import TypedDict

from finetune import __version__
from finetune.checkpoint.format import layout
from finetune.checkpoint.format.layout import MANIFEST, step_of
from finetune.errors import CheckpointError
from finetune.runtime.files import atomic
from finetune.runtime.files.read import first_problem as json_problem
from finetune.runtime.files.read import parse_as, parse_json, read_regular
from finetune.runtime.progress import MAX_STEPS, UnsupportedVersion, parse_progress


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
        number = value.get("format_version")
        if not isinstance(number, int) or isinstance(number, bool):
            raise ValueError("format_version: missing, or not a number")
        if number != FORMAT_VERSION:
            versions = value.get("versions")
            wrote = str(versions.get("finetune", "")) if isinstance(versions, dict) else ""
            raise OtherFormatError(
                f"{path.parent}: a checkpoint of format {number}, written by finetune "
                f"{wrote or 'of an unknown version'}; finetune {__version__} reads format {FORMAT_VERSION}. "
                f"Nothing was changed. Install finetune {wrote or 'in the version that wrote it'}, or set "
                f"checkpoint.resume to a checkpoint of format {FORMAT_VERSION}."
            )
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
    run = RunFingerprint(**stored["run"])
    files = {name: FileChecksum(**checksum) for name, checksum in stored["files"].items()}
    fields: dict[str, Any] = {**stored, "run": run, "files": files}
    return Manifest(**fields)


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


DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of an element, by the safetensors name of its dtype."""

_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Shape = Annotated[list[_Count], Field(max_length=64)]
_Dtype = Literal["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"]
_MAX_FLOAT32 = 3.4028234e38  # optimizers count in float32
_Number = (
    Annotated[int, Field(ge=-(2**63), lt=2**63)]
    | Annotated[float, Field(ge=-_MAX_FLOAT32, le=_MAX_FLOAT32, allow_inf_nan=False)]
)


@with_config(STRICT)
class _IndexEntry(TypedDict):
    file: str
    name: str
    key: str
    shape: _Shape
    dtype: _Dtype
    sha256: Digest


@with_config(STRICT)
class _Scalars(TypedDict):
    optimizer: dict[str, dict[str, _Number]]
    loss_scale: dict[str, _Number]


_INDEX = TypeAdapter(dict[str, _IndexEntry])
_SCALARS = TypeAdapter(_Scalars)


@dataclass(frozen=True)
class Metadata:
    """The content of a checkpoint's JSON files other than the manifest."""

    index: Mapping[str, Mapping[str, Any]]  # by the stored name of a tensor
    scalars: Mapping[str, Any]
    progress: Mapping[str, Any]  # as of `Progress.state_dict`


def read_metadata(path: Path, manifest: Manifest) -> Metadata:
    """Return index, scalars and progress, after the caller has verified their checksums.

    Raises CheckpointError if they do not fit a checkpoint with this manifest, OtherFormatError for an unknown version
    of the progress.
    """
    if missing := [name for name in layout.METADATA_FILES if name not in manifest.files]:
        raise CheckpointError(f"{path}: {layout.MANIFEST} does not list {missing[0]}, which every checkpoint has")
    try:
        index = read_index(path, manifest)
        scalars = _parse(path, layout.SCALARS, _SCALARS)
        parameters = {entry["name"] for entry in index.values() if entry["key"] == "parameter"}
        if unknown := scalars["optimizer"].keys() - parameters:
            raise CheckpointError(
                f"{path}: {layout.SCALARS} has numbers of {min(unknown)[:80]!r}, which is not a parameter"
            )
        progress = parse_progress(read_regular(path / layout.PROGRESS))
        if progress.step != manifest.step:
            raise ValueError(f"it is for step {progress.step}, but the manifest for step {manifest.step}")
        return Metadata(index, scalars, progress.state_dict())
    except OSError as error:
        raise CheckpointError(f"{path}: {Path(str(error.filename)).name} cannot be read: {error.strerror}") from error
    except UnsupportedVersion as error:
        wrote = manifest.versions.get("finetune", "(unknown version)")
        raise OtherFormatError(
            f"{path}: {error}. Nothing was changed. Install finetune {wrote}, which wrote it, to resume from it."
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path}: {layout.PROGRESS} is invalid: {error}") from None


def read_index(path: Path, manifest: Manifest) -> Mapping[str, Mapping[str, Any]]:
    """Return the index entry of each tensor; raises CheckpointError, or OSError if the file cannot be read."""
    index: Mapping[str, Mapping[str, Any]] = _parse(path, layout.INDEX, _INDEX)
    for stored, entry in index.items():
        name = entry["name"]
        if entry["file"] not in manifest.files or entry["file"] in layout.METADATA_FILES:
            problem = f"lists the file {entry['file'][:80]!r}, which is not in the manifest"
        elif stored != (name if entry["key"] in ("parameter", "buffer") else f"{name}/{entry['key']}"):
            problem = f"stores a tensor of {name[:80]!r} under the name {stored[:80]!r}"
        elif math.prod(entry["shape"]) * DTYPE_BYTES[entry["dtype"]] > manifest.files[entry["file"]].size_bytes:
            problem = f"gives {stored[:80]!r} more elements than fit into {entry['file']}"
        else:
            continue
        raise CheckpointError(f"{path}: {layout.INDEX} {problem}")
    return index


def header_problem(path: Path, name: str, index: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the problem of a tensor file's header, as a sentence; None if it matches the index."""
    expected = {stored: entry for stored, entry in index.items() if entry["file"] == name}
    if not expected:
        return None
    try:
        with safe_open(path / name, framework="np") as file:
            slices = {stored: file.get_slice(stored) for stored in file.keys()}  # noqa: SIM118  # not a mapping
            headers = {stored: (view.get_dtype(), view.get_shape()) for stored, view in slices.items()}
    except (OSError, SafetensorError) as error:
        return f"{name} is not a safetensors file: {error}"
    if headers.keys() != expected.keys():
        return f"{name} does not contain the tensors listed in {layout.INDEX}"
    for stored, entry in expected.items():
        if headers[stored] != (entry["dtype"], entry["shape"]):
            return f"{name} has {stored[:80]!r} with another shape or dtype than in {layout.INDEX}"
    return None


def _parse(path: Path, name: str, schema: TypeAdapter[Any]) -> Any:
    try:
        return parse_as(schema, read_regular(path / name))
    except ValueError as error:
        raise CheckpointError(f"{path}: {name} is invalid: {error}") from None


def state_digest(
    index: Mapping[str, Mapping[str, Any]], *, scalars: Mapping[str, Mapping[str, Any]], step: int, samples: str
) -> str:
    """Return the SHA-256 of a training state; independent of ranks, strategy, files and their order.

    It is equal for two checkpoints from which training continues identically. `index` and `scalars` are the content of
    the files of these names, `samples` is the `samples_sha256` of the progress. The digest covers the lines `name dtype
    shape sha256` of all tensors, by name, then `step` and all numbers of optimizer and loss scale.
    """
    lines = [
        f"{name} {entry['dtype']} {list(entry['shape'])} {entry['sha256']}" for name, entry in sorted(index.items())
    ]
    optimizer = {name: _numbers(values) for name, values in scalars["optimizer"].items()}
    rest = {"optimizer": optimizer, "loss_scale": _numbers(scalars["loss_scale"]), "step": step, "samples": samples}
    lines.append(json.dumps(rest, sort_keys=True))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _numbers(values: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers as floats: a counter may be an integer under one strategy and a float under another."""
    return {name: float(value) for name, value in values.items()}
