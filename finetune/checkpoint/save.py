"""A checkpoint is staged, verified, given its manifest and renamed: a reader sees all of it or none."""

import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from finetune import __version__
from finetune.checkpoint import layout
from finetune.checkpoint.gather import agree_on_records, gather_tensor
from finetune.checkpoint.manifest import FileFacts, Manifest, file_facts, first_problem, write_manifest
from finetune.checkpoint.record import TensorRecord
from finetune.checkpoint.sharing import PlannedFile, collective_order, plan_files
from finetune.checkpoint.state import Scalars, StateAccess
from finetune.checkpoint.tensor_file import TensorFile
from finetune.checkpoint.together import all_do, main_does
from finetune.errors import CheckpointError
from finetune.runtime import files, ranks
from finetune.runtime.amounts import size_text

_SLACK_BYTES = 16 << 20


def write_checkpoint(
    folder: Path, step: int, *, access: StateAccess, identity: Mapping[str, str], progress: Mapping[str, Any]
) -> Manifest:
    """Write the checkpoint of a step into `folder` and return its manifest; on failure nothing is left. Collective."""
    staging = layout.staging_folder(folder, step)
    access.begin_reading()
    records = agree_on_records(access)
    planned = plan_files(records, world=ranks.world())
    # Nobody writes before the folder is there and what an earlier save has left in it is gone.
    main_does(lambda: _stage(staging, num_bytes=sum(record.size_bytes for record in records)))
    try:
        written = _write_tensors(staging, planned, access=access)
        scalars = _merge(ranks.gather_objects(access.read_scalars()))
        # Only when every rank has reported its files does rank 0 vouch for them; nobody goes on before the rename.
        return main_does(
            lambda: _finish(
                staging,
                layout.step_folder(folder, step),
                texts={
                    layout.INDEX: _index(planned),
                    layout.SCALARS: {"optimizer": scalars, "loss_scale": access.loss_scale.read()},
                    layout.PROGRESS: dict(progress),
                },
                manifest=Manifest(step=step, identity=dict(identity), versions=_versions(), files=written),
            )
        )
    except CheckpointError:
        # Every rank is past its last write (the error came from a gathering of outcomes), so nothing reappears.
        if ranks.is_main():
            shutil.rmtree(staging, ignore_errors=True)
        raise


def _stage(staging: Path, *, num_bytes: int) -> None:
    staging.parent.mkdir(parents=True, exist_ok=True)
    layout.remove_staging(staging.parent)
    free = shutil.disk_usage(staging.parent).free
    if free < num_bytes + _SLACK_BYTES:
        raise CheckpointError(
            f"{staging.parent}: a checkpoint needs {size_text(num_bytes + _SLACK_BYTES)}, free are {size_text(free)}. "
            "Make room, lower checkpoint.keep_last, or let run.folder be on another disk."
        )
    staging.mkdir()


def _write_tensors(staging: Path, planned: Sequence[PlannedFile], *, access: StateAccess) -> dict[str, FileFacts]:
    """Write all ranks' files and return the facts of all of them, each read back by its writer. Collective."""
    writing = _Writing(staging)
    for file, record in collective_order(planned):
        tensor = gather_tensor(access, record, owner=file.owner)
        if tensor is not None:
            writing.add(file, tensor)
    shares = all_do(writing.close)
    return {name: facts for share in shares for name, facts in share.items()}


class _Writing:
    """The files of one rank; a failure is kept until the end, as other ranks still need this one to gather tensors."""

    def __init__(self, staging: Path) -> None:
        self._staging = staging
        self._open: dict[str, TensorFile] = {}
        self._failure: Exception | None = None

    def add(self, file: PlannedFile, tensor: Any) -> None:
        if self._failure is not None:
            return
        try:
            if file.name not in self._open:
                path = self._staging / file.name
                path.parent.mkdir(exist_ok=True)
                self._open[file.name] = TensorFile(path, file.records)
            self._open[file.name].add(tensor)
        except Exception as error:  # raised by `close`, on every rank
            self._failure = error

    def close(self) -> dict[str, FileFacts]:
        if self._failure is not None:
            for file in self._open.values():
                file.abandon()
            raise CheckpointError(f"cannot write {self._staging}: {self._failure}") from self._failure
        written = {name: file.close() for name, file in self._open.items()}
        problem = first_problem(self._staging, written, written)
        if problem is not None:
            raise CheckpointError(f"{self._staging}: {problem}, right after writing it. Suspect the disk.")
        return written


def _finish(staging: Path, final: Path, *, texts: Mapping[str, Any], manifest: Manifest) -> Manifest:
    for name, value in texts.items():
        files.write_json(staging / name, value)
    small = {name: file_facts(staging / name) for name in texts}
    manifest = Manifest(manifest.step, manifest.identity, manifest.versions, {**small, **manifest.files})
    for folder in {(staging / name).parent for name in manifest.files}:
        files.sync(folder)
    write_manifest(staging, manifest)
    staging.rename(final)
    files.sync(final.parent)
    return manifest


def _merge(all_scalars: Sequence[Scalars]) -> Scalars:
    merged: Scalars = {}
    for scalars in all_scalars:
        merged.update(scalars)
    return merged


def _index(planned: Sequence[PlannedFile]) -> dict[str, Any]:
    def entry(file: PlannedFile, record: TensorRecord) -> dict[str, Any]:
        return {"file": file.name, "name": record.name, "key": record.key, "shape": record.shape, "dtype": record.dtype}

    return {record.stored_name: entry(file, record) for file in planned for record in file.records}


def _versions() -> dict[str, str]:
    return {"finetune": __version__, **{name: version(name) for name in ("torch", "accelerate", "transformers")}}
