"""The state of a checkpoint is written into what training holds, each rank reading only the rows of its own share."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open

from finetune.checkpoint import layout
from finetune.checkpoint.find import Found
from finetune.checkpoint.gather import agree_on_records
from finetune.checkpoint.record import PARAMETER, WHOLE, TensorRecord
from finetune.checkpoint.state import StateAccess
from finetune.checkpoint.tensor_file import read_span
from finetune.checkpoint.together import all_do, main_does
from finetune.errors import CheckpointError

_LISTED = 8


def read_checkpoint(found: Found, *, access: StateAccess) -> dict[str, Any]:
    """Load the verified checkpoint and return its progress; raises CheckpointError listing what differs. Collective."""
    path = found.path
    index, scalars, progress = main_does(lambda: _read_texts(path))
    saved = {name: (_member(found, entry["file"]), _record(entry)) for name, entry in index.items()}
    all_do(access.begin_writing)  # local: the optimizer makes its state
    wanted = agree_on_records(access)
    fresh = _parameters_without_state([record for _, record in saved.values()])
    _refuse_differences(path, saved, [record for record in wanted if record.key in WHOLE or record.name not in fresh])
    # Nobody starts to hand values on (which is collective) before all have read theirs without an error.
    all_do(lambda: _write_all(saved, scalars, fresh=fresh, access=access))
    access.finish_writing()
    return progress


def refuse_other_identity(path: Path, saved: Mapping[str, str], *, wanted: Mapping[str, str]) -> None:
    """Raise CheckpointError that names every way in which the checkpoint is of another run than this one."""
    names = [name for name in {**saved, **wanted} if saved.get(name) != wanted.get(name)]
    if names:
        lines = [f"  {name}: {saved.get(name, 'nothing')} there, {wanted.get(name, 'nothing')} here" for name in names]
        raise CheckpointError(
            f"{path} cannot be continued by this run, which is another one\n" + "\n".join(lines) + "\n"
            "Restore the config it was made with, or write another run.folder to start anew."
        )


def _read_texts(path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    names = (layout.INDEX, layout.SCALARS, layout.PROGRESS)
    index, scalars, progress = (json.loads((path / name).read_text(encoding="utf-8")) for name in names)
    return index, scalars, progress


def _member(found: Found, name: str) -> Path:
    """Return a file of the checkpoint; one that the manifest does not vouch for is never opened."""
    if name not in found.manifest.files:
        raise CheckpointError(f"{found.path / layout.INDEX}: names the file {name!r}, which is not in the manifest.")
    return found.path / name


def _record(entry: Mapping[str, Any]) -> TensorRecord:
    return TensorRecord(name=entry["name"], key=entry["key"], shape=tuple(entry["shape"]), dtype=entry["dtype"])


def _parameters_without_state(records: Sequence[TensorRecord]) -> set[str]:
    """Return the parameters that had not been updated when the checkpoint was taken."""
    updated = {record.name for record in records if record.part == "optimizer"}
    return {record.name for record in records if record.key == PARAMETER} - updated


def _refuse_differences(
    path: Path, saved: Mapping[str, tuple[Path, TensorRecord]], wanted: Sequence[TensorRecord]
) -> None:
    expected = {record.stored_name: record for record in wanted}
    missing = [name for name in expected if name not in saved]
    extra = [name for name in saved if name not in expected]
    reshaped = [
        f"{name} ({list(saved[name][1].shape)} there, {list(record.shape)} here)"
        for name, record in expected.items()
        if name in saved and saved[name][1].shape != record.shape
    ]
    lines = [
        f"  {word}: {_listed(names)}"
        for word, names in (
            ("not in the checkpoint", missing),
            ("only in the checkpoint", extra),
            ("of another shape", reshaped),
        )
        if names
    ]
    if lines:
        raise CheckpointError(
            f"{path} does not hold the state that this run trains\n" + "\n".join(lines) + "\n"
            "Restore model, lora, freeze and optimizer as they were, or write another run.folder to start anew."
        )


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _write_all(
    saved: Mapping[str, tuple[Path, TensorRecord]],
    scalars: Mapping[str, Any],
    *,
    fresh: set[str],
    access: StateAccess,
) -> None:
    access.forget(fresh)
    with _files() as open_file:
        for path, record in saved.values():
            start, stop = access.span(record)
            access.write(record, read_span(open_file(path), record, start=start, stop=stop))
    access.write_scalars(scalars["optimizer"])
    access.loss_scale.write(scalars["loss_scale"])


@contextmanager
def _files() -> Iterator[Any]:
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}

        def open_file(path: Path) -> Any:
            if path not in opened:
                opened[path] = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            return opened[path]

        yield open_file
