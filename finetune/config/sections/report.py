"""`report:` - who is told about the run."""

from typing import Literal

from finetune.config.section import Positive, Section, Strings, key


class ReportSection(Section):
    """Who is told about the run."""

    log_every_steps: Positive = key("Steps between two log lines; every step is in `events.jsonl` all the same.", 1)
    console: Literal["auto", "rich", "plain"] = key(
        "Progress bar or plain lines; `auto` asks whether there is a terminal.", "auto"
    )
    trackers: Strings = key(
        "Trackers that Accelerate knows: `tensorboard`, `wandb`, `mlflow`, `trackio`, ... (extra `tracking`).", ()
    )
    sample_ids: bool = key(
        "Write the ids of the samples that each process was really handed into `samples/`, step by step.", False
    )
    project: str | None = key("Project name at the trackers; unset, the name of the run folder's parent.", None)
