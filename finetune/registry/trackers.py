"""The trackers of Accelerate that `report.trackers` may name. A session may register others with Accelerate."""

from dataclasses import dataclass

from finetune.registry.table import Entry, Table


@dataclass(frozen=True, kw_only=True)
class TrackerEntry(Entry):
    """A tracker, and the arguments by which it is given the run's name and folder; None: by none."""

    name_argument: str | None = None
    folder_argument: str | None = None


TRACKERS = Table(
    "tracker",
    TrackerEntry,
    (
        TrackerEntry(name="aim"),
        TrackerEntry(name="clearml"),
        TrackerEntry(name="comet_ml"),
        TrackerEntry(name="dvclive"),
        TrackerEntry(name="mlflow", name_argument="run_name"),
        TrackerEntry(name="swanlab"),
        TrackerEntry(name="tensorboard"),
        TrackerEntry(name="trackio", name_argument="name"),
        TrackerEntry(name="wandb", name_argument="name", folder_argument="dir"),
    ),
)
