"""Observers of a run: Accelerate's trackers, and the reporters and callbacks that plugins add.

A session may register other trackers with Accelerate.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Flag, auto

from finetune.registry.table import Entry, Table


@dataclass(frozen=True, kw_only=True)
class TrackerEntry(Entry):
    """A tracker, and the arguments of its own that take the run's folder and the keys of `report:`."""

    folder_argument: str | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)  # by key: `run_name`, `entity`, `group`, `tags`
    tags_are_named: bool = False  # a mapping from names to values, not a list of names
    id_argument: str | None = None  # takes the id of a run to continue; None: every start is a new run
    id_attribute: str = ""  # of the tracker's own run, with its id
    resume_arguments: Mapping[str, str] = field(default_factory=dict)  # next to the id
    config_is_fixed: bool = False  # of a run that is continued


TRACKERS = Table(
    "tracker",
    TrackerEntry,
    (
        TrackerEntry(name="aim"),
        TrackerEntry(name="clearml", arguments={"run_name": "task_name", "tags": "tags"}),
        TrackerEntry(name="comet_ml", arguments={"entity": "workspace"}),
        TrackerEntry(name="dvclive"),
        TrackerEntry(
            name="mlflow",
            arguments={"run_name": "run_name", "tags": "tags"},
            tags_are_named=True,
            id_argument="run_id",
            id_attribute="info.run_id",
            config_is_fixed=True,
        ),
        TrackerEntry(
            name="swanlab",
            arguments={"run_name": "experiment_name", "entity": "workspace", "group": "group", "tags": "tags"},
        ),
        TrackerEntry(name="tensorboard"),
        TrackerEntry(name="trackio", arguments={"run_name": "name", "group": "group"}),
        TrackerEntry(
            name="wandb",
            folder_argument="dir",
            arguments={"run_name": "name", "entity": "entity", "group": "group", "tags": "tags"},
            id_argument="id",
            id_attribute="id",
            resume_arguments={"resume": "allow"},
        ),
    ),
)


class Request(Flag):
    """Requests of a callback. Ranks agree before the next step: all do what one of them requests."""

    EVALUATE = auto()  # on the validation rows, now
    SAVE = auto()  # a checkpoint, now
    STOP = auto()  # with a checkpoint; the same command resumes


NO_REQUEST = Request(0)


@dataclass(frozen=True, kw_only=True)
class ReporterEntry(Entry):
    """A reporter. Its implementation is called with the run folder, a path, and returns a `report.reporter.Reporter`.

    It exists on rank 0 alone.
    """


REPORTERS: Table[ReporterEntry] = Table("reporter", ReporterEntry)


@dataclass(frozen=True, kw_only=True)
class CallbackEntry(Entry):
    """A callback. Its implementation is called without arguments, on every rank, and returns the callback.

    That is a function from an event (`report.events`) to a Request or None.
    """


CALLBACKS: Table[CallbackEntry] = Table("callback", CallbackEntry)
