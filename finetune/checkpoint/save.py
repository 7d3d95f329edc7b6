"""A checkpoint is staged, verified, given its manifest and renamed: a reader sees all of it or none."""

import shutil
import time
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from finetune import __version__
from finetune.checkpoint import layout
from finetune.checkpoint.contents import Contents, Streaming
from finetune.checkpoint.digest import state_digest
from finetune.checkpoint.facts import RunFacts
from finetune.checkpoint.manifest import FileFacts, Manifest, file_facts, write_manifest
from finetune.checkpoint.room import require_room, told_plainly
from finetune.checkpoint.sharing import PlannedFile
from finetune.checkpoint.state import StateAccess
from finetune.checkpoint.together import all_do, main_does
from finetune.checkpoint.writing import Writing, Written
from finetune.errors import CheckpointError, NonFiniteError
from finetune.runtime import files, ranks
from finetune.runtime.ranks import Group
from finetune.runtime.waypoints import reach


def write_checkpoint(
    folder: Path, step: int, *, access: StateAccess, run: RunFacts, progress: Mapping[str, Any]
) -> Manifest:
    """Write the checkpoint of a step into `folder` and return its manifest; on failure nothing is left. Collective."""
    return write_contents(folder, Streaming(access).take(step, progress=progress), run=run)


def write_contents(folder: Path, contents: Contents, *, run: RunFacts, group: Group = Group.MAIN) -> Manifest:
    """Write the contents as a checkpoint in `folder` and return its manifest; on failure nothing is left of it.

    Raises CheckpointError where it cannot be written, NonFiniteError where nobody would want it. Collective.
    """
    staging = layout.staging_folder(folder, contents.step)
    # Nobody writes before the folder is there and what an earlier save has left in it is gone.
    main_does(partial(_stage, staging, num_bytes=contents.size_bytes), group=group)
    try:
        writing = Writing(staging, step=contents.step)
        for file, record, tensor in contents.tensors():
            writing.add(file, record, tensor)
            del tensor  # so that it is gone when the next ones are gathered
        written = Written.of_all(all_do(writing.close, group=group))
        if written.bad:
            newest = main_does(partial(_newest, folder), group=group)
            raise NonFiniteError(_refusal(contents.step, bad=written.bad, newest=newest))
        # Only when every rank has reported its files does rank 0 vouch for them; nobody goes on before the rename.
        manifest = main_does(partial(_finish, staging, contents, run=run, written=written), group=group)
    except (CheckpointError, NonFiniteError):
        # Every rank is past its last write (the error came from a gathering of outcomes), so nothing reappears.
        if ranks.is_main():
            shutil.rmtree(staging, ignore_errors=True)
        raise
    all_do(partial(_arrive, layout.step_folder(folder, contents.step), contents), group=group)
    return manifest


def _arrive(final: Path, contents: Contents) -> None:
    own = next((final / file.name for file in contents.planned if file.owner == ranks.rank()), None)
    reach("save.done", step=contents.step, path=own)


def _stage(staging: Path, *, num_bytes: int) -> None:
    with told_plainly(staging.parent):
        staging.parent.mkdir(parents=True, exist_ok=True)
        layout.remove_staging(staging.parent)
        require_room(staging.parent, num_bytes)
        staging.mkdir()


def _finish(staging: Path, contents: Contents, *, run: RunFacts, written: Written) -> Manifest:
    """Write what is not tensors, the manifest last, and give the folder its name."""
    index = _index(contents.planned, written.tensors)
    texts = {layout.INDEX: index, layout.SCALARS: contents.scalars, layout.PROGRESS: contents.progress}
    final = layout.step_folder(staging.parent, contents.step)
    with told_plainly(staging):
        for name, value in texts.items():
            files.write_json(staging / name, value, exact=True)
        small = {name: file_facts(staging / name) for name in texts}
        manifest = _manifest(contents, run=run, files={**small, **written.files}, index=index)
        for folder in {(staging / name).parent for name in manifest.files}:
            files.sync(folder)
        reach("save.manifest", step=contents.step)
        write_manifest(staging, manifest)
        reach("save.rename", step=contents.step)
        staging.rename(final)
        files.sync(final.parent)
    return manifest


def _manifest(
    contents: Contents, *, run: RunFacts, files: Mapping[str, FileFacts], index: Mapping[str, Any]
) -> Manifest:
    step, progress = contents.step, contents.progress
    samples = str(progress.get("samples_sha256", ""))
    return Manifest(
        step=step,
        run=run,
        metrics=dict(progress["last_metrics"]) if progress.get("metrics_step") == step else {},
        state_sha256=state_digest(index, scalars=contents.scalars, step=step, samples=samples),
        created=time.time(),
        versions=_versions(),
        files=files,
    )


def _index(planned: Sequence[PlannedFile], digests: Mapping[str, str]) -> dict[str, Any]:
    return {
        record.stored_name: {
            **{"file": file.name, "name": record.name, "key": record.key, "shape": record.shape},
            **{"dtype": record.dtype, "sha256": digests[record.stored_name]},
        }
        for file in planned
        for record in file.records
    }


def _refusal(step: int, *, bad: Sequence[str], newest: str | None) -> str:
    more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    return (
        f"step {step}: {bad[0]}{more} is not finite, so no checkpoint was taken. "
        + (f"The last good one is {newest}." if newest else "There is none from before.")
        + " Lower train.learning_rate or set train.max_gradient_norm, and start again: it continues from there."
    )


def _newest(folder: Path) -> str | None:
    return next((str(path) for path in reversed(layout.steps(folder).values())), None)


def _versions() -> dict[str, str]:
    return {"finetune": __version__, **{name: version(name) for name in ("torch", "accelerate", "transformers")}}
