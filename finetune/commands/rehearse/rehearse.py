"""The phases of a rehearsal in their order: each ends with what it has proved, or with the error and its place."""

import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.commands.rehearse.accelerate_file import (
    AccelerateFile,
    LaunchFile,
    for_this_machine,
    read_accelerate_file,
)
from finetune.commands.rehearse.architecture import Architecture, from_config_values, shrink_architecture
from finetune.commands.rehearse.evidence import (
    checkpoint_evidence,
    export_evidence,
    resume_evidence,
    steps_evidence,
    strategy_evidence,
    template_evidence,
)
from finetune.commands.rehearse.job import Schedule, as_overrides, job_changes, not_proved, plan_schedule, wanted_sizes
from finetune.commands.rehearse.model_copy import write_model_copy, write_new_adapter
from finetune.commands.rehearse.report import Rehearsal
from finetune.commands.rehearse.rows import Wanted, choose_rows
from finetune.commands.rehearse.runs import (
    Launch,
    PhaseError,
    compare_resumed,
    run_to_end,
    run_until_saved,
    set_aside,
)
from finetune.commands.rehearse.shrink import Change
from finetune.commands.rehearse.targets import match_targets
from finetune.config.load import LoadedConfig, load_config, require_divisible_batch
from finetune.config.run_config import RunConfig
from finetune.config.sections.model import ModelSection
from finetune.config.sections.train import TrainSection
from finetune.errors import FinetuneError, UserError
from finetune.registry.tasks import TASKS
from finetune.report.run_log import RunLog
from finetune.run.setup.data import make_training_data
from finetune.run.setup.model import require_adaptable, require_buildable, require_routers
from finetune.runtime.files import atomic
from finetune.runtime.text.library_output import quiet_libraries

_CHARACTERS_PER_TOKEN = 4
_MIN_FIRST_ROWS = 32


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line."""

    config: Path
    overrides: tuple[str, ...]
    accelerate: Path
    processes: int
    steps: int
    keep: Path | None
    time_limit_minutes: float


def rehearse(request: Request, *, is_json: bool) -> int:
    """Rehearse the job and return the exit code: 0, 2 for what the user can fix, 1 for anything else that failed.

    Works in a folder of its own, which is removed unless it is to be kept; no process is left behind.
    """
    quiet_libraries(is_main=True)
    report = Rehearsal(is_json)
    with _stopping_on_signals(), _scratch(request.keep) as folder:
        try:
            _Phases(request, folder, report).run()
        except PhaseError as error:
            report.failed(error.phase, str(error), log=_kept_log(error, folder, request.keep))
            return error.exit_code
    report.finish()
    return 0


@contextmanager
def _stopping_on_signals() -> Iterator[None]:
    """Have SIGTERM end the rehearsal as Ctrl-C does: with no process and no folder left."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)


@contextmanager
def _scratch(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="finetune-rehearse-", ignore_cleanup_errors=True) as folder:
            yield Path(folder).resolve()
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise UserError(f"--keep {keep}: it already exists and is not empty. Name another folder.")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep.resolve()


def _kept_log(error: PhaseError, folder: Path, keep: Path | None) -> str | None:
    """Return the path of the failed run's log, which outlives the folder of the rehearsal."""
    if error.log is None or not error.log.exists():
        return None
    if keep is not None:
        return str(error.log)
    return str(shutil.copy(error.log, Path(tempfile.mkdtemp(prefix="finetune-rehearse-failed-")) / error.log.name))


class _Phases:
    """The phases, in order; each leaves what the next ones need."""

    def __init__(self, request: Request, folder: Path, report: Rehearsal) -> None:
        self._request = request
        self._folder = folder
        self._report = report
        self._deadline = time.monotonic() + 60 * request.time_limit_minutes
        self._values: dict[str, Any] = {}  # overrides of the rehearsal

    def run(self) -> None:
        """Go through all phases; raises PhaseError."""
        with _phase("job"):
            loaded, file, here = self._read_job()
        config = loaded.config
        schedule = plan_schedule(
            config,
            steps=self._request.steps,
            processes=here.data_parallel_size,
            real_processes=file.data_parallel_size,
        )
        with _phase("model"):
            self._shrink_model(loaded)
        with _phase("data"):
            self._choose_rows(config, schedule)
        with _phase("job"):
            self._replace(list(job_changes(config, schedule, folder=self._folder)))
            loaded = self._rehearsed()
        with _phase("template"):
            data = make_training_data(loaded.config, RunLog(is_main=True, write=lambda line: None))
            self._report.passed("template", *template_evidence(loaded.config, data))
        self._launch(here, schedule, loaded)

    def _read_job(self) -> tuple[LoadedConfig, AccelerateFile, LaunchFile]:
        """Read both files and check them for the real number of processes."""
        loaded = load_config(self._request.config, self._request.overrides)
        file = read_accelerate_file(self._request.accelerate)
        require_divisible_batch(loaded, num_processes=file.data_parallel_size)
        is_fp16 = loaded.config.train.precision == "fp16"
        here = for_this_machine(file, processes=self._request.processes, is_fp16=is_fp16, folder=self._folder)
        self._report.replaced += here.changes
        self._report.passed("job", f"{file.text}; {_batch_text(loaded.config.train, file.data_parallel_size)}")
        return loaded, file, here

    def _shrink_model(self, loaded: LoadedConfig) -> None:
        """Try the job's names on the real architecture, and write the small one."""
        config, head = loaded.config, TASKS[loaded.config.task.name].head
        require_buildable(loaded)
        require_adaptable(loaded)
        require_routers(loaded)
        architecture = shrink_architecture(config.model, head=head, sizes=wanted_sizes(config))
        targets = match_targets(config, architecture)
        self._report.replaced += [*architecture.changes, *targets.changes]
        self._values |= targets.overrides
        if config.model.from_config is not None:
            if not architecture.is_same:
                self._values["model.from_config.values"] = from_config_values(config.model.from_config, architecture)
        else:
            self._copy_model(config, architecture, head=head)
        if config.task.distillation is not None:
            self._copy_teacher(config, config.task.distillation.teacher)
        layers = ", ".join(
            f"{one.name}: {len(one.kinds)} layers of {len(set(one.kinds))} kind{'s' * (len(set(one.kinds)) > 1)}"
            for one in architecture.real_stacks[:2]
        )
        kind = f"{architecture.config.model_type} with {architecture.num_parameters:,} parameters"
        self._report.passed("model", f"{kind}; {layers}" if layers else kind, *targets.matched)

    def _copy_model(self, config: RunConfig, architecture: Architecture, *, head: str) -> None:
        folder, section = self._folder / "model", config.model
        write_model_copy(architecture, section, head=head, folder=folder)
        self._replace(
            [
                Change("model.name", section.name, str(folder), "the small model, with random weights"),
                Change("model.revision", section.revision, None, "it is a folder"),
            ]
        )
        if section.config:
            self._replace([Change("model.config", section.config, {}, "its values are in the small model's config")])
        if section.rope_scaling is not None:
            scaling = section.rope_scaling.model_dump()
            self._replace([Change("model.rope_scaling", scaling, None, "it is in the small model's config")])
        if section.adapter is not None:
            written = self._folder / "adapter"
            write_new_adapter(section, architecture, base=folder, head=head, folder=written)
            self._replace(
                [Change("model.adapter", str(section.adapter), str(written), "its weights do not fit the small model")]
            )

    def _copy_teacher(self, config: RunConfig, name: str) -> None:
        section = ModelSection(name=name, trust_remote_code=config.model.trust_remote_code)
        architecture = shrink_architecture(section, head="causal_lm", sizes=wanted_sizes(config))
        folder = self._folder / "teacher"
        write_model_copy(architecture, section, head="causal_lm", folder=folder, seed=1)  # not the student: loss 0
        self._replace([Change("task.distillation.teacher", name, str(folder), "made small as the model is")])

    def _choose_rows(self, config: RunConfig, schedule: Schedule) -> None:
        batch, data = schedule.global_batch_size, config.data
        tokens = (data.batching.tokens or data.max_length or 0) if data.batching.by != "samples" else 0
        wanted = Wanted(max(2 * batch, _MIN_FIRST_ROWS), 2 * batch * tokens * _CHARACTERS_PER_TOKEN)
        chosen = choose_rows(config, wanted=wanted, folder=self._folder / "data")
        self._report.replaced += chosen.changes
        self._values |= chosen.overrides
        self._report.passed("data", *chosen.lines)

    def _replace(self, changes: Sequence[Change]) -> None:
        changed = [each for each in changes if each.was != each.now]
        self._report.replaced += changed
        self._report.unproved += not_proved(changed)
        self._values |= {each.key: each.now for each in changed}

    def _rehearsed(self) -> LoadedConfig:
        """Return the job as it is rehearsed."""
        return load_config(self._request.config, self._overrides())

    def _overrides(self) -> tuple[str, ...]:
        return (*self._request.overrides, *as_overrides(self._values))

    def _launch(self, here: LaunchFile, schedule: Schedule, loaded: LoadedConfig) -> None:
        """Run the job until its last step is saved, kill it, resume it from the step before, and compare."""
        file, run = self._folder / "accelerate.json", self._folder / "run"
        atomic.write_json(file, here.values)
        launch = Launch(
            file, here.processes, self._request.config.absolute(), self._overrides(), run, deadline=self._deadline
        )
        log, resumed_log = self._folder / "first.log", self._folder / "resumed.log"
        run_until_saved(launch, step=schedule.steps, log=log)
        self._report.passed("strategy", *strategy_evidence(run))
        self._report.passed("steps", *steps_evidence(run))
        straight = set_aside(run, keep=schedule.saved_at, folder=self._folder / "uninterrupted")
        with _phase("checkpoint"):
            self._report.passed("checkpoint", *checkpoint_evidence(run))
        export_error = None
        try:
            run_to_end(launch, step=schedule.saved_at, last=schedule.steps, log=resumed_log)
        except PhaseError as error:
            if error.phase != "export":
                raise
            export_error = error
        resumed = compare_resumed(straight, run, step=schedule.saved_at, log=resumed_log)
        self._report.passed("resume", *resume_evidence(resumed, step=schedule.saved_at))
        if export_error is not None:
            raise export_error
        self._report.passed("export", *export_evidence(loaded.config, run))


@contextmanager
def _phase(name: str) -> Iterator[None]:
    """Turn what goes wrong here into the failure of this phase."""
    try:
        yield
    except PhaseError:
        raise
    except FinetuneError as error:
        raise PhaseError(name, str(error), exit_code=error.exit_code) from error


def _batch_text(train: TrainSection, processes: int) -> str:
    """Return how the global batch is shared by the real number of processes."""
    if not isinstance(train.microbatch_size, int):
        return f"global batch {train.global_batch_size} on {processes} processes, as many per microbatch as fit"
    accumulation = train.global_batch_size // (processes * train.microbatch_size)
    shares = f"{processes} x {train.microbatch_size} x {accumulation} accumulated"
    return f"global batch {train.global_batch_size} = {shares}"
