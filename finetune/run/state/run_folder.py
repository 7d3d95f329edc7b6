"""The run folder: leftovers of killed starts are removed, and config, environment and inputs written before step 1.

Tokenizer, processor and task facts are kept in `inputs/`, so that a checkpoint can be exported without the data.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from finetune.checkpoint.read.checksum_prefetch import ChecksumPrefetch
from finetune.config.explain import resolved_yaml
from finetune.config.load import LoadedConfig
from finetune.config.run_config import RunConfig
from finetune.config.sections.data import DataSection
from finetune.data.token_cache.cache import cache_folder
from finetune.data.workers import format_loader_settings, loader_settings, machine_resources
from finetune.errors import UserError
from finetune.model.processing import Processing, load_saved_processing
from finetune.registry.tasks import TASKS
from finetune.report.build import build_reporter
from finetune.report.events import Event
from finetune.report.page.interruptions import InterruptionCosts
from finetune.report.reporter import Reporter, RunLog
from finetune.run.remote.download import download_run
from finetune.run.setup.data_audit import write_audit
from finetune.run.setup.padding_free import resolve_padding_free
from finetune.run.setup.prepared_model import BuiltRun
from finetune.run.state.finished import read_record
from finetune.run.state.preflight import prefetch_checksums
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
from finetune.runtime.files.digests import digests_file, find_folder_damage, write_folder_digests
from finetune.runtime.files.read import parse_as, read_regular
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
    return checksums or prefetch_checksums(loaded)


def remove_leftovers(config: RunConfig, *, log: RunLog) -> None:
    """Remove them from the run folder, which this process has locked, and from the cache where they are abandoned.

    Raises OSError where the folder cannot be written: a full disk is reported before any data is prepared.
    """
    run = Path(config.run.folder)
    cleared = remove_stale(run, seconds=STALE_SECONDS_LOCKED, below=True)
    for folder in {cache_folder(config.data), Path(digests.CACHE_FOLDER).expanduser()}:
        cleared += remove_stale(folder, seconds=STALE_SECONDS_SHARED, below=True)
    if cleared:
        more = f" and {len(cleared) - 1} more" if len(cleared) > 1 else ""
        log(f"removed {cleared[0]}{more}: left by a process that was killed")
    if read_record(run) is None:  # a finished run may have nothing left to write
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
    digests = digests_file(folder)
    if digests is None:
        return
    damage = find_folder_damage(folder)
    if damage is not None:
        raise UserError(
            f"{folder}: {damage}: damaged, or changed since the run wrote it. Start the job again, which writes it "
            f"again, or delete {digests.name} to use the files as they are."
        )


SECRETS_REMOVED = "# As written, except for values that look like secrets: they are replaced by '[redacted]'.\n"


def open_run_folder(
    loaded: LoadedConfig,
    built: BuiltRun,
    *,
    costs: InterruptionCosts,
    log: RunLog,
    reporters: Sequence[Callable[[Event], object]] = (),
) -> Reporter:
    """Write config, environment, inputs and audit of the run to its folder, and return its reporter. Collective.

    Rank 0's passes all events to the `reporters`, too.
    """
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
        accelerator=built.prepared.accelerator,
        is_main=distributed.is_main(),
        notes=log.messages,
        on_read=costs,
        others=reporters,
    )


def config_copy(text: str) -> str:
    """Return the job file as it was written; where it holds secrets, without them and with a last line about it."""
    cleaned = redacted_yaml(text)
    return text if cleaned == text else cleaned.rstrip("\n") + "\n" + SECRETS_REMOVED
