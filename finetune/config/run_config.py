"""RunConfig: the whole job YAML, and the microbatches that its batch allows."""

from typing import Any, Literal

from pydantic import model_validator

from finetune.config.section import Section, key
from finetune.config.sections.checkpoint import CheckpointSection
from finetune.config.sections.data import DataSection
from finetune.config.sections.evaluate import EvaluateSection
from finetune.config.sections.export import ExportSection
from finetune.config.sections.model import ModelSection
from finetune.config.sections.plugins import PluginOptions, Plugins
from finetune.config.sections.report import ReportSection
from finetune.config.sections.run import RunSection
from finetune.config.sections.task import TaskSection
from finetune.config.sections.train import TrainSection
from finetune.registry.tasks import TASKS


class RunConfig(Section):
    """A job: model, data, task, training, checkpoints, evaluation, reports and export."""

    version: Literal[1] = key("Version of the keys of this file. A file of another version is refused.", 1)
    run: RunSection = key("Output folder, seed and supervision of the run.")
    model: ModelSection = key(
        "Which weights to start from, their dtype and attention, adapters, and which parameters are trained."
    )
    data: DataSection = key("Which rows are used, how they become tokens, and how they are loaded.")
    task: TaskSection = key("What the model is trained to do with a row.")
    train: TrainSection = key(
        "How the model is trained: batch, budget, optimizer, schedule, precision and when to stop."
    )
    checkpoint: CheckpointSection = key(
        "When the run saves checkpoints, which it keeps, and where it resumes.", CheckpointSection()
    )
    evaluate: EvaluateSection | None = key("What is measured on the validation rows, and when.", None)
    report: ReportSection = key("Where the run is logged.", ReportSection())
    export: ExportSection = key("The model that the run leaves in `final/`.", ExportSection())

    @model_validator(mode="before")
    @classmethod
    def _resolve_dtype(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not _freezes_bf16(values):
            return values
        return {**values, "model": {**values["model"], "dtype": "bfloat16"}}

    plugins: Plugins = key(
        "Modules that add names: `my_package.losses`, `./my_task.py` (a path begins with `.`, `/` or `~`), or "
        "installed distributions. Each rank imports them; nothing is imported because it is installed.",
        (),
    )
    plugin_options: PluginOptions = key(
        "The options of plugins, by the name that they add: `{my_loss: {gamma: 2.0}}`; see docs/how-to/plugins.md.",
        None,
    )


def _freezes_bf16(values: dict[str, Any]) -> bool:
    """Return whether `model.dtype: auto` is bfloat16: only LoRA's factors are trained, and products are in bf16."""
    model, train, task = (values.get(name) for name in ("model", "train", "task"))
    if not (isinstance(model, dict) and isinstance(train, dict) and isinstance(task, dict)):
        return False
    lora, entry = model.get("lora"), TASKS.get(task.get("name", ""))
    if not isinstance(lora, dict) or entry is None or entry.head not in ("causal_lm", "seq2seq_lm"):
        return False  # another head is new, and trained
    is_plain = lora.get("init", "default") in ("default", "gaussian") and not lora.get("dora")
    trains_more = lora.get("modules_to_save") or model.get("new_tokens") or model.get("quantization")
    is_auto = model.get("dtype", "auto") == "auto" and train.get("precision") == "bf16"
    return is_auto and is_plain and not trains_more


def with_run_folder(config: RunConfig, folder: str) -> RunConfig:
    """Return the config with another `run.folder`."""
    return config.model_copy(update={"run": config.run.model_copy(update={"folder": folder})})


def smallest_microbatch_size(config: RunConfig) -> int:
    """Return `train.microbatch_size`, or the smallest size of `auto`: whole groups of batch norms."""
    return _batch_norm_group(config) if config.train.microbatch_size == "auto" else config.train.microbatch_size


def _batch_norm_group(config: RunConfig) -> int:
    group = config.model.batch_norm
    return group if isinstance(group, int) else 1


def possible_microbatch_sizes(config: RunConfig, *, num_processes: int) -> tuple[int, ...]:
    """Return the possible sizes of `train.microbatch_size: auto`, ascending: the divisors of a process's share."""
    share, unit = config.train.global_batch_size // num_processes, _batch_norm_group(config)
    return tuple(size for size in range(unit, share + 1, unit) if share % size == 0)
