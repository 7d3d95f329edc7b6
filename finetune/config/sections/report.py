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
    expert_load: bool = key(
        "Mixtures of experts: log with each step how evenly tokens are sent to the experts. `train.router_aux_loss` "
        "does so, too.",
        False,
    )
    project: str | None = key("Project name for the trackers; unset, the name of the run folder's parent.", None)
