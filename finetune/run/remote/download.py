"""Download of a run at a URL: its folder on this machine, and its newest checkpoint."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from filelock import FileLock

from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import OtherFormatError, first_file_problem, read_manifest
from finetune.config.load import LoadedConfig
from finetune.config.paths import is_url, local_run_folder
from finetune.config.run_config import with_run_folder
from finetune.errors import CheckpointError, FinetuneError
from finetune.runtime.files.remote import RemoteFolder
from finetune.runtime.resources import format_size
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER, FINAL_FOLDER
from finetune.runtime.supervision.status import STATUS_FILE as STATUS

_NOT_DOWNLOADED = ("", CHECKPOINTS_FOLDER, FINAL_FOLDER, STATUS, "STOP")
"""Beginnings of names that are not brought with the rest; hidden ones are not either: `..` and our locks are such."""

_LOCK = ".fetch.lock"
_PROBE = ".probe"


def with_local_folder(loaded: LoadedConfig) -> LoadedConfig:
    """Return the config with the folder on this machine in place of the URL, which it remembers; a path stays."""
    run = loaded.config.run
    if not is_url(run.folder):
        return loaded
    local = local_run_folder(run.folder, run.local_folder)
    return replace(loaded, config=with_run_folder(loaded.config, str(local)), remote=run.folder)


def download_run(loaded: LoadedConfig, *, log: Callable[[str], None]) -> None:
    """Download newer files at the run's URL to its local folder, in one process while the others wait on a lock file.

    No collective, as it may take longer than one allows. Raises CheckpointError where the URL cannot be reached or
    written to: now, and not when the first checkpoint is due. Does nothing for a run without a URL.
    """
    if loaded.remote is None:
        return
    stage = Path(loaded.config.run.folder)
    stage.mkdir(parents=True, exist_ok=True)
    with FileLock(stage / _LOCK):
        try:
            remote = RemoteFolder(loaded.remote)
            _probe(remote, stage)
            _download_newer(remote, stage, log=log)
        except FinetuneError:
            raise
        except Exception as error:  # each storage has exceptions of its own
            raise CheckpointError(
                f"run.folder: {loaded.remote} cannot be used: {type(error).__name__}: {error}. Check the bucket, the "
                "permissions and the credentials in the environment of this machine."
            ) from error


def marked_steps(sizes: dict[str, int]) -> list[int]:
    """Return the steps whose checkpoints are whole in the storage, oldest first: their marker, the manifest, is up."""
    markers = [name for name in sizes if name.split("/")[2:] == [layout.MANIFEST]]
    return sorted(step for name in markers if (step := step_of(name)) is not None)


def step_of(name: str) -> int | None:
    """Return the step of the checkpoint that a file in the storage belongs to, None for any other file.

    >>> step_of("checkpoints/step-000004/model/00000.safetensors"), step_of("events.jsonl")
    (4, None)
    """
    parts = name.split("/")
    return layout.step_of(Path(parts[1])) if len(parts) > 2 and parts[0] == CHECKPOINTS_FOLDER else None


def _probe(remote: RemoteFolder, stage: Path) -> None:
    """Write and delete a file: a storage that answers may still refuse to take anything."""
    probe = stage / _PROBE
    probe.write_text("finetune looked whether it may write here\n", encoding="utf-8")
    try:
        remote.upload(probe, _PROBE)
    finally:
        probe.unlink()
    remote.delete([_PROBE])


def _download_newer(remote: RemoteFolder, stage: Path, *, log: Callable[[str], None]) -> None:
    sizes = remote.sizes()
    newest_here = max(layout.steps(stage / CHECKPOINTS_FOLDER), default=-1)
    newer = [step for step in marked_steps(sizes) if step > newest_here]
    if newer:
        for name in sizes:
            if name.partition("/")[0] not in _NOT_DOWNLOADED and not any(
                part.startswith(".") for part in name.split("/")
            ):
                remote.download(name, stage / name)
    for step in reversed(newer):
        path = layout.step_folder(stage / CHECKPOINTS_FOLDER, step)
        problem = _download_checkpoint(remote, path)
        if problem is None:
            log(f"fetched {path.name}, {format_size(read_manifest(path).size_bytes)}, from {remote.url}")
            return
        log(f"warning: passed over {remote.url}/{CHECKPOINTS_FOLDER}/{path.name}: {problem}")


def _download_checkpoint(remote: RemoteFolder, path: Path) -> str | None:
    """Download a checkpoint, marker first, and rename it into place when it verifies; else return the problem."""
    staging = path.with_name(f".fetched-{path.name}")
    shutil.rmtree(staging, ignore_errors=True)
    remote_folder = f"{CHECKPOINTS_FOLDER}/{path.name}"
    try:
        remote.download(f"{remote_folder}/{layout.MANIFEST}", staging / layout.MANIFEST)
        manifest = read_manifest(staging)
        for name in manifest.files:
            remote.download(f"{remote_folder}/{name}", staging / name)
        problem = first_file_problem(staging, manifest.files, manifest.files)
        if problem is None and manifest.step != layout.step_of(path):
            problem = f"its manifest is of step {manifest.step}"
    except OtherFormatError:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    except (CheckpointError, FileNotFoundError) as error:
        problem = str(error)
    if problem is None:
        staging.rename(path)
    else:
        shutil.rmtree(staging, ignore_errors=True)
    return problem
