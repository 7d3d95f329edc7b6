"""Which weights an export needs, and those of the base that training itself held in few bits."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.integrations import is_deepspeed_zero3_enabled

from finetune.config.rules.model import ADAPTERS, adapter_of
from finetune.config.run_config import RunConfig
from finetune.config.sections.export import ExportSection
from finetune.errors import ModelError
from finetune.run.model import build_model
from finetune.runtime.construction import Construction
from finetune.task.protocol import Task


def merges(config: RunConfig) -> bool:
    """Tell whether the export is a whole model that an adapter is merged into."""
    return config.export.merge and adapter_of(config) is not None


def needs_trained_only(config: RunConfig) -> bool:
    """Tell whether the export needs no weights but those that were trained: the base is elsewhere, or loaded anew."""
    is_elsewhere = adapter_of(config) is not None and config.model.name is not None
    return is_elsewhere and (not merges(config) or config.model.quantization is not None)


def original_weights(config: RunConfig, task: Task, *, tokenizer: Any, say: Callable[[str], None]) -> dict[str, Tensor]:
    """Return the base as it was before it was quantised, in float32 on the CPU, where a merge needs it; else nothing.

    Raises ModelError where the adapter does not belong on it. No collective: for the main process.
    """
    if not merges(config) or config.model.quantization is None:
        return {}
    say(
        "the adapter was trained on a base in few bits and is merged into the original one, loaded in full precision: "
        "the result is not exactly the model that was measured, so measure it with `finetune evaluate`"
    )
    without: dict[str, Any] = {**dict.fromkeys(ADAPTERS), "quantization": None, "dtype": "float32"}
    section = config.model.model_copy(update=without)
    bare = config.model_copy(update={"model": section})
    model = build_model(bare, task=task, tokenizer=tokenizer, construction=Construction())
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def require_mergeable(config: RunConfig) -> None:
    """Raise ModelError, before any step is taken, where a merge at the end would be wrong or could not be had."""
    section = config.model
    if not merges(config) or section.quantization is None:
        return
    if section.lora is not None and section.lora.init == "loftq":
        raise ModelError(
            "export.merge: adapters of `init: loftq` make up for what quantisation lost, so they do not belong on the "
            "original base. Leave `merge` out, or write another `model.lora.init`."
        )
    if is_deepspeed_zero3_enabled():
        raise ModelError(
            "export.merge: under ZeRO-3 the original of a quantised base cannot be loaded on one process. Leave "
            "`merge` out, and run `finetune export RUN --merge` afterwards."
        )


def written_section(config: RunConfig) -> ExportSection:
    """Return what the export is told; a merge into a base loaded anew has the type that the job held it in."""
    if merges(config) and config.model.quantization is not None and config.export.dtype is None:
        return config.export.model_copy(update={"dtype": config.model.dtype})
    return config.export
