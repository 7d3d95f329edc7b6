"""TensorBoard, Weights & Biases, MLflow, trackio and others, through Accelerate's trackers."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import LoggerType

from finetune.config.sections.report import ReportSection
from finetune.errors import MissingPackage, UserError
from finetune.registry.observers import TRACKERS
from finetune.report.events import Evaluated, Event, RunEnded, RunStarted, StepTaken
from finetune.report.timing import ThroughputMeter
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


class TrackersReporter:
    """Sends steps and evaluations to the trackers; they are started with the run's config when it starts.

    Only the main rank may have one. Secrets are left out of the config.
    """

    def __init__(self, accelerator: Accelerator, section: ReportSection, *, run_folder: Path) -> None:
        check_trackers(section.trackers)
        self._accelerator = accelerator
        self._section = section
        self._run_folder = run_folder
        self._meter = ThroughputMeter(0)
        self._num_steps = 0

    def __call__(self, event: Event) -> None:
        """Send the event's numbers, if it has any."""
        match event:
            case RunStarted():
                self._num_steps = event.num_steps
                self._meter = ThroughputMeter(event.num_steps)
                folder = self._run_folder / "trackers"
                folder.mkdir(parents=True, exist_ok=True)
                self._accelerator.project_configuration.logging_dir = str(folder)
                names = tuple(dict.fromkeys(self._section.trackers))
                self._accelerator.log_with = [LoggerType(name) if name in set(LoggerType) else name for name in names]
                self._accelerator.init_trackers(
                    self._section.project or self._run_folder.parent.name or "finetune",
                    config=flatten_config(redacted_config(event.config)),
                    init_kwargs={name: tracker_options(name, self._section, self._run_folder) for name in names},
                )
            case StepTaken():
                self._meter.add(event)
                if Cadence(self._section.log_every_steps, self._num_steps).due(event.step):
                    self._accelerator.log(step_metrics(event, meter=self._meter), step=event.step)
                    self._meter.reset_data_share()
            case Evaluated():
                self._accelerator.log(
                    {f"evaluation/{name}": value for name, value in event.metrics.items()}, step=event.step
                )
            case RunEnded():
                self._accelerator.log({"run/seconds": event.seconds}, step=event.step)

    def close(self) -> None:
        """End the trackers' runs. `Accelerator.end_training` would also destroy this rank's process group."""
        for tracker in self._accelerator.trackers:
            tracker.finish()
        self._accelerator.trackers = []


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
