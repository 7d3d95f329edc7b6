"""`report:` - where the run is logged."""

from typing import Annotated, Literal

from pydantic import Field

from finetune.config.section import Name, OneOf, Positive, Section, Strings, key
from finetune.registry.observers import REPORTERS

Reporters = Annotated[tuple[Annotated[str, OneOf(REPORTERS)], ...], Field(strict=False)]


class ProfileSection(Section):
    """A window of steps that is profiled: a trace of each process, the memory, and a table of the step by phase."""

    start: Positive = key("The first step that is profiled; steps before it warm up.", 10)
    steps: Positive = key("How many steps are profiled. Each one adds to the trace: a few are enough.", 3)
    memory: bool = key(
        "Also record what is in memory: torch's snapshot of a GPU in a file, or the allocations on a CPU in the trace.",
        True,
    )
    stacks: bool = key("Record the Python stack of every operator: slower, and a larger trace.", False)


class ReportSection(Section):
    """Where the run is logged."""

    log_every_steps: Positive = key("Log every N steps; `events.jsonl` has every step regardless.", 10)
    console: Literal["auto", "rich", "plain"] = key(
        "Progress bar or plain lines; `auto`: a progress bar if there is a terminal.", "auto"
    )
    trackers: Strings = key(
        "Trackers that Accelerate supports: `tensorboard`, `wandb`, `mlflow`, `trackio`, ... (extra `tracking`).", ()
    )
    reporters: Reporters = key("Reporters that plugins add: each is called with every event on the main process.", ())
    sample_ids: bool = key(
        "Write the ids of the samples that each process received into `samples/`, step by step.", False
    )
    expert_load: bool = key(
        "Mixtures of experts: log with each step how evenly tokens are sent to the experts. `train.router_aux_loss` "
        "does so, too.",
        False,
    )
    profile: ProfileSection | None = key("Profile some steps; unset, nothing is profiled.", None)
    prometheus: int | None = key(
        "Serve `/metrics` for Prometheus on this port of the main process (extra `monitoring`); unset, nothing is "
        "served.",
        None,
        ge=1,
        le=65_535,
    )
    prometheus_address: Name = key(
        "The address on which `/metrics` is served; `0.0.0.0` lets other machines read it, without a password.",
        "127.0.0.1",
    )
    price_per_device_hour: float | None = key(
        "US dollars for an hour of one device, for the cost of restarts; unset, the lowest price on demand that "
        "`finetune plan` knows for the GPU.",
        None,
        ge=0.0,
        le=1e6,
    )
    project: Name | None = key("Project name for the trackers; unset, the name of the run folder's parent.", None)
    run_name: Name | None = key("Name of the run in the trackers; unset, the name of the run folder.", None)
    entity: Name | None = key("The team or user of Weights & Biases, the workspace of SwanLab or Comet.", None)
    group: Name | None = key("The group of runs that the run belongs to in Weights & Biases, SwanLab or Trackio.", None)
    tags: Strings = key("Tags of the run in Weights & Biases, SwanLab, MLflow or ClearML.", ())
