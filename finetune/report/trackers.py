"""TensorBoard, Weights & Biases, MLflow, trackio and others, through Accelerate's trackers."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import LoggerType
from pydantic import TypeAdapter

from finetune.config.sections.report import ReportSection
from finetune.errors import MissingPackage, UserError
from finetune.registry.observers import TRACKERS, TrackerEntry
from finetune.report.events import Evaluated, Event, RunEnded, RunStarted, StepTaken
from finetune.report.timing import ThroughputMeter
from finetune.runtime.files.atomic import write_json
from finetune.runtime.files.read import parse_as, read_regular
from finetune.runtime.optional import no_op
from finetune.runtime.progress import Cadence
from finetune.runtime.text.redact import redacted_config


def check_trackers(names: Sequence[str]) -> None:
    """Raise UserError for a tracker that Accelerate does not support, MissingPackage if its package is missing."""
    available = {str(tracker) for tracker in get_available_trackers()}
    known = sorted(LOGGER_TYPE_TO_CLASS)
    builtin = {str(tracker) for tracker in LoggerType}
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean `{near[0]}`?" if near else f"Accelerate supports {', '.join(known)}."
            raise UserError(f"report.trackers: unknown tracker `{name}`. {hint}")
        if name in builtin and name not in available:
            raise MissingPackage(
                f"report.trackers: the package of `{name}` is not installed. Install it with: "
                "pip install 'finetune-accelerate[tracking]' (tensorboard, wandb, mlflow, trackio) or "
                f"pip install {name}, or remove it from `report.trackers`."
            )


class TrackerReporter:
    """Sends steps and evaluations to one tracker, which is started with the run's config when the run starts.

    A resumed run continues the tracker's run, whose id is in the run folder; where its service refuses that, it gets a
    new one, and `warn` a message. Only the main rank may have one. Secrets are left out of the config.
    """

    def __init__(
        self, name: str, section: ReportSection, *, run_folder: Path, warn: Callable[[int, str], object] = no_op
    ) -> None:
        self.__name__ = f"the tracker `{name}`"
        self._name = name
        self._section = section
        self._run_folder = run_folder
        self._warn = warn
        self._tracker: Any = None
        self._meter = ThroughputMeter(0)
        self._num_steps = 0

    def __call__(self, event: Event) -> None:
        """Send the event's numbers, if it has any."""
        match event:
            case RunStarted():
                self._num_steps = event.num_steps
                self._meter = ThroughputMeter(event.num_steps)
                self._start_run(event)
            case StepTaken():
                self._meter.add(event)
                if Cadence(self._section.log_every_steps, self._num_steps).due(event.step):
                    self._tracker.log(step_metrics(event, meter=self._meter), step=event.step)
                    self._meter.reset_data_share()
            case Evaluated():
                self._tracker.log(
                    {f"evaluation/{name}": value for name, value in event.metrics.items()}, step=event.step
                )
            case RunEnded():
                self._tracker.log({"run/seconds": event.seconds}, step=event.step)

    def close(self) -> None:
        """End the tracker's run."""
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            tracker.finish()

    def _start_run(self, event: RunStarted) -> None:
        entry = TRACKERS.get(self._name) or TrackerEntry(name=self._name)
        project = self._section.project or self._run_folder.parent.name or "finetune"
        path = self._run_folder / TRACKER_RUNS_FILE
        runs = _read_runs(path)
        known = runs.get(self._name, {})
        old_id = known.get("id") if event.step > 0 and known.get("project") == project else None
        if entry.id_argument is not None and old_id is not None:
            try:
                self._start(project, {entry.id_argument: old_id, **entry.resume_arguments})
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                self._warn(
                    event.step, f"`{self._name}` does not continue its run {old_id}, and starts a new one: {reason}"
                )
                old_id = None
        if self._tracker is None:
            self._start(project, {})
        if old_id is None or not entry.config_is_fixed:
            self._tracker.store_init_configuration(flatten_config(redacted_config(event.config)))
        if entry.id_argument is not None:
            new_id = attrgetter(entry.id_attribute)(self._tracker.tracker)
            write_json(path, {**_read_runs(path), self._name: {"project": project, "id": str(new_id)}})

    def _start(self, project: str, resumed: Mapping[str, str]) -> None:
        tracker_class: Any = LOGGER_TYPE_TO_CLASS[self._name]
        folder = self._run_folder / "trackers"
        folder.mkdir(parents=True, exist_ok=True)
        arguments = (project, str(folder)) if tracker_class.requires_logging_directory else (project,)
        tracker = tracker_class(*arguments, **tracker_options(self._name, self._section, self._run_folder), **resumed)
        tracker.start()
        self._tracker = tracker


TRACKER_RUNS_FILE = "trackers.json"
"""The id and the project of the run in each tracker's service, by the tracker's name."""


def _read_runs(path: Path) -> dict[str, dict[str, str]]:
    """Return the runs in the file; none if it does not exist or is damaged: the trackers start new ones."""
    try:
        return dict(parse_as(_RUNS, read_regular(path)))
    except (OSError, ValueError):
        return {}


_RUNS: TypeAdapter[Any] = TypeAdapter(dict[str, dict[str, str]])


def step_metrics(event: StepTaken, *, meter: ThroughputMeter) -> dict[str, float]:
    """Return the metrics of a step."""
    return {
        "train/loss": event.loss,
        **({} if event.epoch is None else {"train/epoch": event.epoch}),
        "train/learning_rate": event.learning_rate,
        "train/gradient_norm": event.gradient_norm,
        "train/num_targets": event.num_targets,
        "train/num_tokens": event.num_tokens,
        "train/tokens_per_second": meter.tokens_per_second,
        "train/seconds": event.seconds,
        "train/data_seconds": event.data_seconds,
        "train/data_share": meter.data_share,  # of the time since the last log point
        "train/memory_bytes": event.memory_bytes,
        **{f"train/{name}": value for name, value in event.metrics.items()},
        **{f"device/{name}": value for name, value in event.device.items()},
    }


def flatten_config(config: Mapping[str, Any], *, prefix: str = "") -> dict[str, int | float | str | bool]:
    """Return nested values under dotted keys, with lists and None as text, as trackers expect them."""
    values: dict[str, int | float | str | bool] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            values |= flatten_config(value, prefix=f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return values


def tracker_options(tracker: str, section: ReportSection, run_folder: Path) -> dict[str, Any]:
    """Return the tracker-specific arguments; none for a tracker that a caller registered with Accelerate.

    >>> tracker_options("trackio", ReportSection(group="ablation"), Path("runs/first"))
    {'name': 'first', 'group': 'ablation'}
    """
    if tracker not in TRACKERS:
        return {}
    entry = TRACKERS[tracker]
    values = {
        "run_name": section.run_name or run_folder.name,
        "entity": section.entity,
        "group": section.group,
        "tags": dict.fromkeys(section.tags, "true") if entry.tags_are_named else list(section.tags),
    }
    options = {entry.arguments[key]: value for key, value in values.items() if value and key in entry.arguments}
    if entry.folder_argument is not None:
        options[entry.folder_argument] = str(run_folder)
    return options
