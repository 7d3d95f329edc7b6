"""The run folder: leftovers are removed, newer files at its URL fetched, and config and inputs written before step 1.

Tokenizer, processor and task facts are kept in `inputs/`, so that a checkpoint can be exported without the data.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
from pydantic import TypeAdapter

from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import OtherFormatError, first_file_problem, read_manifest
from finetune.checkpoint.read.checksum_prefetch import ChecksumPrefetch, start_checksum_prefetch
from finetune.config.explain import resolved_yaml
from finetune.config.load import LoadedConfig
from finetune.config.run_config import RunConfig
from finetune.config.sections.data import DataSection
from finetune.config.sections.report import ReportSection
from finetune.data.loader import format_loader_settings, loader_settings, machine_resources
from finetune.data.token_cache.cache import cache_folder
from finetune.errors import CheckpointError, FinetuneError, UserError
from finetune.model.processing import Processing, load_saved_processing
from finetune.registry.observers import REPORTERS
from finetune.registry.tasks import TASKS
from finetune.report.console import ConsoleReporter, choose_screen
from finetune.report.events import JsonlReporter, Warned
from finetune.report.history import EVENTS_FILE, RunHistory
from finetune.report.page.facts import InterruptionCosts
from finetune.report.page.page import PageReporter
from finetune.report.prometheus import PrometheusReporter, require_client
from finetune.report.reporter import FanOut, Reporter, RunLog
from finetune.report.trackers import TrackerReporter, check_trackers
from finetune.run.setup.build import BuiltRun
from finetune.run.setup.model_problems import resolve_padding_free
from finetune.run.setup.training_data import write_audit
from finetune.run.state.finished import read_final_record
from finetune.runtime import distributed
from finetune.runtime.environment import environment_facts
from finetune.runtime.files import atomic, digests
from finetune.runtime.files.atomic import (
    STALE_SECONDS_LOCKED,
    STALE_SECONDS_SHARED,
    remove_stale,
    replace_folder,
    temporary_path,
)
from finetune.runtime.files.digests import DIGESTS_FILE, find_folder_damage, write_folder_digests
from finetune.runtime.files.read import parse_as, read_regular
from finetune.runtime.files.remote import RemoteFolder
from finetune.runtime.optional import no_op
from finetune.runtime.resources import format_size
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER, FINAL_FOLDER
from finetune.runtime.supervision.status import STATUS_FILE as STATUS
from finetune.runtime.text.redact import redacted_yaml
from finetune.runtime.text.terminal import format_json
from finetune.task.lm_loss.target_loss import resolve_kernel
from finetune.task.protocol import Task, TaskContext, build_task

_PROBE_BYTES = 256 << 10
"""The approximate size of the files that a run writes before its first step."""


def fetch_run_folder(
    loaded: LoadedConfig, checksums: ChecksumPrefetch | None, *, log: RunLog
) -> ChecksumPrefetch | None:
    """Remove leftovers of killed starts, download newer files at the run's URL, and return the started checksums."""
    if distributed.is_main():
        remove_leftovers(loaded.config, log=log)
    download_run(loaded, log=print)
    section, folder = loaded.config.checkpoint, Path(loaded.config.run.folder) / CHECKPOINTS_FOLDER
    return checksums or start_checksum_prefetch(folder, resume=section.resume)


def remove_leftovers(config: RunConfig, *, log: RunLog) -> None:
    """Remove them from the run folder, which this process has locked, and from the cache if they are abandoned.

    Raises OSError where the folder cannot be written: a full disk is reported before any data is prepared.
    """
    run = Path(config.run.folder)
    cleared = remove_stale(run, seconds=STALE_SECONDS_LOCKED, below=True)
    for folder in {cache_folder(config.data), Path(digests.CACHE_FOLDER).expanduser()}:
        cleared += remove_stale(folder, seconds=STALE_SECONDS_SHARED, below=True)
    if cleared:
        more = f" and {len(cleared) - 1} more" if len(cleared) > 1 else ""
        log(f"removed {cleared[0]}{more}: left by a process that was killed")
    if read_final_record(run) is None:  # a finished run may have nothing left to write
        probe = temporary_path(run / "probe")
        try:
            atomic.write_bytes(probe, bytes(_PROBE_BYTES))
        finally:
            probe.unlink(missing_ok=True)


INPUTS_FOLDER = "inputs"
TASK_FACTS_FILE = "task_facts.json"

_FACTS: TypeAdapter[Mapping[str, Any]] = TypeAdapter(dict[str, Any])


@dataclass(frozen=True)
class RunInputs:
    """Tokenizer, processor and task facts of a run: enough to build its task again without its data."""

    processing: Processing
    facts: Mapping[str, Any]

    def task(self, config: RunConfig, *, data: DataSection | None = None) -> Task:
        """Return the run's task without its rows; `data` is the `data:` section, resolved for another model."""
        tokenizer, processor = self.processing.tokenizer, self.processing.processor
        kernel, _ = resolve_kernel(config.train.loss_kernel)
        data = data or resolve_padding_free(config)
        return build_task(TaskContext(config.task, data, tokenizer, processor, facts=self.facts, loss_kernel=kernel))


def load_run_inputs(run: Path, config: RunConfig) -> RunInputs:
    """Return the inputs that the run has saved; raises UserError where there are none, or none that can be read.

    Code of a tokenizer runs only where `model.trust_remote_code` is set.
    """
    folder = run / INPUTS_FOLDER
    if not folder.is_dir():
        raise UserError(
            f"{folder} does not exist. A run saves its tokenizer there when it starts: start the job again (with "
            "`checkpoint.resume: auto` it resumes), or copy the files of the tokenizer there."
        )
    _require_undamaged(folder)
    trusts, path = config.model.trust_remote_code, folder / TASK_FACTS_FILE
    reads = TASKS[config.task.name].reads
    processing = load_saved_processing(folder, reads=reads, key="run", trust_remote_code=trusts)
    try:
        return RunInputs(processing, parse_as(_FACTS, read_regular(path)) if path.is_file() else {})
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: is damaged: {error}") from error


def _require_undamaged(folder: Path) -> None:
    """Raise UserError where a file is not as it was written; folders without recorded digests are accepted."""
    if (folder / DIGESTS_FILE).is_file() and (damage := find_folder_damage(folder)) is not None:
        raise UserError(
            f"{folder}: {damage}. The files were damaged or changed after the run wrote them. Start the job again, "
            f"which writes them again, or delete {DIGESTS_FILE} to use them as they are."
        )


SECRETS_REMOVED = "# As written, except for values that look like secrets: they are replaced by '[redacted]'.\n"


def open_run_folder(
    loaded: LoadedConfig,
    built: BuiltRun,
    *,
    costs: InterruptionCosts,
    log: RunLog,
    reporters: Sequence[Reporter] = (),
) -> FanOut:
    """Write config, environment, inputs and audit of the run to its folder, and return its reporter. Collective."""
    folder, training_data = Path(loaded.config.run.folder), built.training_data
    resources = machine_resources()
    loading = loader_settings(loaded.config.data, resources=resources, cost=training_data.task.samples.loading_cost)
    if sentence := format_loader_settings(loaded.config.data, loading, resources=resources):
        log(sentence)
    with distributed.rank_0_works_alone():
        if distributed.is_main():
            atomic.write_text(folder / "config.yaml", config_copy(loaded.text))
            atomic.write_text(folder / "resolved.yaml", resolved_yaml(loaded))
            atomic.write_json(folder / "environment.json", environment_facts() | {"loading": asdict(loading)})
            with replace_folder(folder / INPUTS_FOLDER) as staging:
                training_data.processing.save(staging)
                (staging / TASK_FACTS_FILE).write_text(
                    format_json(training_data.task.data_facts.values, indent=1), encoding="utf-8"
                )
                write_folder_digests(staging)
            write_audit(folder, loaded.config, training_data, log=log)
    return build_reporter(
        loaded.config.report,
        run_folder=folder,
        is_main=distributed.is_main(),
        notes=log.messages,
        on_read=costs,
        extra=reporters,
    )


def build_reporter(
    section: ReportSection,
    *,
    run_folder: Path,
    is_main: bool,
    notes: Sequence[str] = (),
    on_read: Callable[[RunHistory], None] = no_op,
    extra: Sequence[Reporter] = (),
) -> FanOut:
    """Return the run's reporter on the main rank, nothing on others: events.jsonl, console, page, trackers, `/metrics`.

    `notes` were printed already; they go to events.jsonl. `on_read` is for the page's reporter, `extra` come from
    a caller. Nothing is written before the first event.
    Raises UserError or MissingPackage, on every rank alike, for a tracker that is unknown or not installed.
    """
    check_trackers(section.trackers)
    if section.prometheus is not None:
        require_client()
    if not is_main:
        return FanOut(())
    reporters: list[Reporter] = []
    for name in section.reporters:
        try:
            reporters.append(REPORTERS.resolve(name)(run_folder))
        except Exception as error:
            raise UserError(
                f"report.reporters: `{name}` failed to start: {type(error).__name__}: {error}. Correct it or remove it."
            ) from error
    reporters += [
        JsonlReporter(run_folder / EVENTS_FILE, notes=notes),
        ConsoleReporter(choose_screen(section.console), log_every_steps=section.log_every_steps),
        PageReporter(run_folder / EVENTS_FILE, on_read=on_read),
    ]
    reporters += [
        TrackerReporter(name, section, run_folder=run_folder, warn=lambda step, text: fan_out(Warned(step, text)))
        for name in dict.fromkeys(section.trackers)
    ]
    if section.prometheus is not None:
        address, name = section.prometheus_address, run_folder.name
        reporters.append(PrometheusReporter(section.prometheus, address=address, name=name, world=distributed.world()))
    fan_out = FanOut([*reporters, *extra])
    return fan_out


def config_copy(text: str) -> str:
    """Return the job file as it was written; if it holds secrets, without them and with a last line about it."""
    cleaned = redacted_yaml(text)
    return text if cleaned == text else cleaned.rstrip("\n") + "\n" + SECRETS_REMOVED


_NOT_DOWNLOADED = ("", CHECKPOINTS_FOLDER, FINAL_FOLDER, STATUS, "STOP")
"""Beginnings of names that are not brought with the rest; hidden ones are not either: `..` and our locks are such."""

_LOCK = ".fetch.lock"
_PROBE = ".probe"


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
            probe = stage / _PROBE  # a storage that answers may still refuse to take anything
            probe.write_text("finetune looked whether it may write here\n", encoding="utf-8")
            try:
                remote.upload(probe, _PROBE)
            finally:
                probe.unlink()
            remote.delete([_PROBE])
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
    return sorted(step for name in markers if (step := step_of_file(name)) is not None)


def step_of_file(name: str) -> int | None:
    """Return the step of the checkpoint that a file in the storage belongs to, None for any other file.

    >>> step_of_file("checkpoints/step-000004/model/00000.safetensors"), step_of_file("events.jsonl")
    (4, None)
    """
    parts = name.split("/")
    return layout.step_of(Path(parts[1])) if len(parts) > 2 and parts[0] == CHECKPOINTS_FOLDER else None


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
