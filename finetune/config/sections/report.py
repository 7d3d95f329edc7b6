"""`report:` - where the run is logged."""

from typing import Literal

from finetune.config.section import Positive, Section, Strings, key


class ReportSection(Section):
    """Where the run is logged."""

    log_every_steps: Positive = key("Log every N steps; `events.jsonl` has every step regardless.", 10)
    console: Literal["auto", "rich", "plain"] = key(
        "Progress bar or plain lines; `auto`: a progress bar if there is a terminal.", "auto"
    )
    trackers: Strings = key(
        "Trackers that Accelerate supports: `tensorboard`, `wandb`, `mlflow`, `trackio`, ... (extra `tracking`).", ()
    )
    sample_ids: bool = key(
        "Write the ids of the samples that each process received into `samples/`, step by step.", False
    )
    project: str | None = key("Project name for the trackers; unset, the name of the run folder's parent.", None)
