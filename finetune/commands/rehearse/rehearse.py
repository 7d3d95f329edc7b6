"""The phases of a rehearsal in order: each ends with its evidence or with an error."""

import json
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.commands.rehearse.accelerate_file import AccelerateFile, for_this_machine, read_accelerate_file
from finetune.commands.rehearse.job_changes import job_changes, match_targets, plan_schedule
from finetune.commands.rehearse.report import Change, Rehearsal
from finetune.commands.rehearse.runs import Launch, PhaseError, launch_and_resume, phase, template_evidence
from finetune.commands.rehearse.small_model import (
    Architecture,
    from_config_values,
    shrink_architecture,
    write_model_copy,
)
from finetune.config.load import LoadedConfig, load_config, require_divisible_batch
from finetune.config.overrides import override_text
from finetune.config.sections.data import DataSection, SourceSection, ValidationSourceSection
from finetune.config.sections.model import ModelSection
from finetune.data.sources.files import Origin
from finetune.data.sources.local import ImageFolder
from finetune.data.sources.source import Source, find_origin, open_source
from finetune.errors import UserError
from finetune.registry.tasks import TASKS
from finetune.report.reporter import RunLog
from finetune.run.setup.model_checks import CheckedJob, Stage, check_model
from finetune.run.setup.training_data import make_training_data
from finetune.runtime.files import atomic
from finetune.runtime.optional import no_op
from finetune.runtime.text.terminal import quiet_libraries

_CHARACTERS_PER_TOKEN = 4
_MIN_FIRST_ROWS = 32


@dataclass(frozen=True)
class RehearseRequest:
    """The command line."""

    config: Path
    overrides: tuple[str, ...]
    accelerate: Path
    processes: int
    steps: int
    keep: Path | None
    time_limit_minutes: float


def rehearse(request: RehearseRequest, *, is_json: bool) -> int:
    """Rehearse the job and return the exit code: 0, 2 for an error that the user can fix, 1 for any other.

    Works in a temporary folder unless `--keep` names one; no process is left running.
    """
    quiet_libraries(is_main=True)
    report, keep = Rehearsal(is_json), request.keep
    if keep is not None:
        if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
            raise UserError(f"--keep {keep}: the folder is not empty. Name another one.")
        keep.mkdir(parents=True, exist_ok=True)
    temporary = tempfile.TemporaryDirectory(prefix="finetune-rehearse-", ignore_cleanup_errors=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C, and leaves no process or folder
    with temporary if keep is None else nullcontext(keep) as folder:
        try:
            _Phases(request, Path(folder).resolve(), report).run()
        except PhaseError as error:
            log = error.log if error.log is not None and error.log.exists() else None
            if log is not None and request.keep is None:  # the folder is removed
                try:
                    log = Path(shutil.copy(log, tempfile.mkdtemp(prefix="finetune-rehearse-failed-")))
                except OSError:  # a full disk, which the error then reports
                    log = None
            report.failed(error.phase, str(error), log=None if log is None else str(log))
            return error.exit_code
    report.finish()
    return 0


class _Phases:
    """The phases in order; each adds the overrides that the next ones need."""

    def __init__(self, request: RehearseRequest, folder: Path, report: Rehearsal) -> None:
        self._request = request
        self._folder = folder
        self._report = report
        self._deadline = time.monotonic() + 60 * request.time_limit_minutes
        self._values: dict[str, Any] = {}  # overrides of the rehearsal

    def run(self) -> None:
        """Go through all phases; raises PhaseError."""
        with phase("job"):
            loaded, file, local_file = self._read_job()
        config = loaded.config
        schedule = plan_schedule(
            config,
            steps=self._request.steps,
            processes=local_file.data_parallel_size,
            real_processes=file.data_parallel_size,
        )
        with phase("model"):
            self._shrink_model(loaded)
        with phase("data"):
            batch, batching = schedule.global_batch_size, config.data.batching
            tokens = 0 if batching.by == "samples" else batching.tokens or config.data.max_length or 0
            overrides, changes = choose_rows(
                config.data,
                num_first=max(2 * batch, _MIN_FIRST_ROWS),
                num_characters=2 * batch * tokens * _CHARACTERS_PER_TOKEN,
                folder=self._folder / "data",
            )
            self._values |= overrides
            self._report.replaced += changes
            self._report.passed("data", *(f"{change.key}: {change.now}" for change in changes))
        with phase("job"):
            self._replace(job_changes(config, schedule, folder=self._folder))
            loaded = load_config(self._request.config, self._overrides())
        with phase("template"):
            data = make_training_data(loaded.config, RunLog(is_main=True, write=no_op))
            self._report.passed("template", *template_evidence(data))
        launch = Launch(
            self._folder / "accelerate.json",
            local_file.num_processes,
            self._request.config.absolute(),
            self._overrides(),
            self._folder / "run",
            deadline=self._deadline,
        )
        atomic.write_json(launch.accelerate, local_file.values)
        launch_and_resume(launch, schedule, report=self._report)

    def _read_job(self) -> tuple[LoadedConfig, AccelerateFile, AccelerateFile]:
        """Read both files and check them for the real number of processes."""
        loaded = load_config(self._request.config, self._request.overrides)
        file = read_accelerate_file(self._request.accelerate)
        require_divisible_batch(loaded, num_processes=file.data_parallel_size)
        is_fp16 = loaded.config.train.precision == "fp16"
        local_file, changes = for_this_machine(file, processes=self._request.processes, is_fp16=is_fp16)
        self._report.replaced += changes
        self._report.passed("job", f"{file.text}; global batch {loaded.config.train.global_batch_size}", *file.notes)
        return loaded, file, local_file

    def _shrink_model(self, loaded: LoadedConfig) -> None:
        """Match the job's names with the real architecture, and write the small model."""
        config, head = loaded.config, TASKS[loaded.config.task.name].head
        lines = check_model(CheckedJob(loaded), [Stage.CONFIG, Stage.MODEL])
        architecture = shrink_architecture(config.model, head=head)
        self._report.replaced += architecture.changes
        self._replace(match_targets(config, architecture))
        if config.model.from_config is None:
            self._copy_model(config.model, architecture, head=head)
        elif architecture.changes:
            self._values["model.from_config.values"] = from_config_values(config.model.from_config, architecture)
        if config.task.distillation is not None:
            name, folder = config.task.distillation.teacher, self._folder / "teacher"
            section = ModelSection(name=name, trust_remote_code=config.model.trust_remote_code)
            teacher = shrink_architecture(section, head="causal_lm")
            # Other weights than the student's, or the loss would be 0.
            write_model_copy(teacher, section, head="causal_lm", folder=folder, seed=1)
            self._replace([Change("task.distillation.teacher", name, str(folder), "a small model, like the student")])
        self._report.passed(
            "model",
            f"{architecture.config.model_type} with {architecture.num_parameters:,} parameters",
            *(f"{stack.name}: {len(stack.kinds)} layers" for stack in architecture.real_stacks),
            *lines,
        )

    def _copy_model(self, section: ModelSection, architecture: Architecture, *, head: str) -> None:
        folder, in_config = self._folder / "model", "it is in the small model's config"
        rope = section.rope_scaling
        write_model_copy(architecture, section, head=head, folder=folder)
        changes = [
            Change("model.name", section.name, str(folder), "the small model, with random weights"),
            Change("model.revision", section.revision, None, "it is a folder"),
            Change("model.config", dict(section.config), {}, in_config),
            Change("model.rope_scaling", rope and rope.model_dump(), None, in_config),
        ]
        if section.adapter is not None:
            why = "the weights of the saved adapter do not fit the small model"
            changes.append(Change("model.adapter", str(section.adapter), None, why))
            changes.append(Change("model.lora", None, {"rank": 8}, why))
        self._replace(changes)

    def _replace(self, changes: Iterable[Change]) -> None:
        changed = [change for change in changes if change.was != change.now]
        self._report.replaced += changed
        self._values |= {change.key: change.now for change in changed}

    def _overrides(self) -> tuple[str, ...]:
        return (*self._request.overrides, *(override_text(key, value) for key, value in self._values.items()))


NUM_LONGEST = 16
MAX_READ_ROWS, MAX_READ_SECONDS = 50_000, 20.0
MAX_ROWS, MAX_TAKEN = 5_000, 256
IMAGES_PER_CLASS = 16
_IMAGE_COLUMNS = ("image", "images")
_SOURCE_ONLY = dict.fromkeys(("delimiter", "quotes", "encoding", "records", "name", "config", "revision", "take"))
_SOURCE_ONLY |= {"skip": 0, "split": "train"}
"""Keys of a source that do not hold for the file with the chosen rows, with the value that they then have."""


def choose_rows(
    data: DataSection, *, num_first: int, num_characters: int, folder: Path
) -> tuple[dict[str, Any], list[Change]]:
    """Write a few rows of every source into `folder`; return the overrides that read them, and a change per source.

    Of each source these are at least its first rows up to both numbers. Raises DataError if one cannot be read.
    """
    overrides: dict[str, Any] = {}
    changes: list[Change] = []
    train, validation = data.train, data.validation
    sources: dict[str, SourceSection] = {f"data.train.mix.{number}": own for number, own in enumerate(train.mix)}
    sources = sources or {"data.train": train}
    if isinstance(validation, ValidationSourceSection) and (validation.path or validation.name):
        sources["data.validation"] = validation
    for key, section in sources.items():
        source = open_source(section, key=key, log=no_op)
        origin = find_origin(section, key=key, log=no_op)
        if isinstance(origin, ImageFolder):  # a few images of every class, spread over its files
            classes: dict[str, list[Path]] = {}
            for file in origin.files:
                classes.setdefault(file.parts[0], []).append(file)
            chosen = [
                file
                for files in classes.values()
                for file in files[:: max(len(files) // IMAGES_PER_CLASS, 1)][:IMAGES_PER_CLASS]
            ]
            for file in chosen:
                (folder / key / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(Path(origin.name) / file, folder / key / file)
            values: dict[str, Any] = {"path": str(folder / key)}
            rows = f"{len(chosen):,} of {len(origin.files):,} images, of all {len(classes)} classes"
        else:
            read, total = _read(source, num_first=num_first, num_characters=num_characters)
            values, rows = _write(read, section, origin, folder=folder / key, total=total)
        overrides |= {f"{key}.{name}": value for name, value in values.items()}
        changes.append(Change(key, str(section.path or section.name), rows, "enough for a few steps"))
    return overrides, changes


def _write(
    rows: list[Any], section: SourceSection, origin: Origin, *, folder: Path, total: str
) -> tuple[dict[str, Any], str]:
    """Write the chosen rows of the source; return the values of its section and a description of the rows."""
    try:
        text = "".join(json.dumps(row) + "\n" for row in rows)
    except (TypeError, ValueError):
        text = ""
    if section.has_positions or origin.class_names() or not text:
        taken = max(1, min(len(rows), MAX_TAKEN))
        return {"take": taken}, f"the first {taken:,} rows, as they cannot be written as JSON Lines with named columns"
    folder.mkdir(parents=True)
    path = folder / "rows.jsonl"
    path.write_text(text, encoding="utf-8")
    values: dict[str, Any] = {"path": str(path)}
    values |= {name: usual for name, usual in _SOURCE_ONLY.items() if getattr(section, name, usual) != usual}
    folders = origin.image_folders
    if section.image_root is None and folders and {*rows[0], *section.columns} & {*_IMAGE_COLUMNS}:
        values["image_root"] = str(folders[0])
    longest = max(len(str(row)) for row in rows)
    return values, f"{len(rows):,} of {total} read: the first and the longest (up to {longest:,} characters)"


def _read(source: Source, *, num_first: int, num_characters: int) -> tuple[list[Any], str]:
    """Return the first rows and the longest of the others, and how many were read."""
    first: list[Any] = []
    longest: list[tuple[int, int, Any]] = []
    characters = number = 0
    deadline = time.monotonic() + MAX_READ_SECONDS
    for number, raw in enumerate(source.rows(), start=1):
        row = dict(raw.parse())
        if len(first) < MAX_ROWS and (len(first) < num_first or characters < num_characters):
            first.append(row)
            characters += len(str(row))
            continue
        longest = sorted([*longest, (len(str(row)), number, row)], key=lambda entry: entry[:2])[-NUM_LONGEST:]
        if number >= MAX_READ_ROWS or time.monotonic() > deadline:
            return [*first, *(row for _, _, row in longest)], f"the first {number:,} rows"
    rows = [*first, *(row for _, _, row in longest)]
    return rows, f"{number:,} rows"
