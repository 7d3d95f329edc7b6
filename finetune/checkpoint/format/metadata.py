"""The JSON files next to the manifest (index, scalars, progress), checked by schemas; the state digest. No torch."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, with_config
from safetensors import SafetensorError, safe_open
from typing_extensions import TypedDict

from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import STRICT, Digest, Manifest, OtherFormatError
from finetune.errors import CheckpointError
from finetune.runtime.files.read import parse_as, read_regular
from finetune.runtime.progress import UnsupportedVersion, parse_progress

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
        return Metadata(index, scalars, _progress(path, manifest))
    except OSError as error:
        raise CheckpointError(f"{path}: {Path(str(error.filename)).name} cannot be read: {error.strerror}") from error


def read_index(path: Path, manifest: Manifest) -> Mapping[str, Mapping[str, Any]]:
    """Return the index entry of each tensor; raises CheckpointError, or OSError if the file cannot be read."""
    index: Mapping[str, Mapping[str, Any]] = _parse(path, layout.INDEX, _INDEX)
    for stored, entry in index.items():
        name = entry["name"]
        if entry["file"] not in manifest.files or entry["file"] in layout.METADATA_FILES:
            problem = f"lists the file {entry['file'][:80]!r}, which is not in the manifest"
        elif stored != (name if entry["key"] in ("parameter", "buffer") else f"{name}/{entry['key']}"):
            problem = f"stores a tensor of {name[:80]!r} under the name {stored[:80]!r}"
        elif _size_bytes(entry) > manifest.files[entry["file"]].size_bytes:
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


def _progress(path: Path, manifest: Manifest) -> Mapping[str, Any]:
    try:
        progress = parse_progress(read_regular(path / layout.PROGRESS))
        if progress.step != manifest.step:
            raise ValueError(f"it is for step {progress.step}, but the manifest for step {manifest.step}")
    except UnsupportedVersion as error:
        wrote = manifest.versions.get("finetune", "(unknown version)")
        raise OtherFormatError(
            f"{path}: {error}. Nothing was changed. Install finetune {wrote}, which wrote it, to resume from it."
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path}: {layout.PROGRESS} is invalid: {error}") from None
    return progress.state_dict()


def _size_bytes(entry: Mapping[str, Any]) -> int:
    size: int = math.prod(entry["shape"]) * DTYPE_BYTES[entry["dtype"]]
    return size


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
