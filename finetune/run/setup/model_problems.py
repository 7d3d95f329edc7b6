"""The model that a job names: whether it can be built and trained as the job says, and what to log about it.

Batches are padding-free where the model is known to keep samples apart that share one row.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import read_manifest_of_step, read_metadata
from finetune.config.load import LoadedConfig
from finetune.config.paths import is_url
from finetune.config.rules.model import adapter_of
from finetune.config.run_config import RunConfig
from finetune.config.section import parent_keys
from finetune.config.sections.data import DataSection
from finetune.errors import CheckpointError, ModelError, Problem
from finetune.model.attention.sample_attention import missing_kernel_warning
from finetune.model.attention.supported_models import (
    OWN_ATTENTION_TYPES,
    PACKED_FROM_THE_FIRST,
    has_sinks,
    needs_flash_attention,
    padding_reason,
    text_config,
)
from finetune.model.build import computes_from_weights
from finetune.model.frozen_models import TEACHER_KEY, stored_method, stored_problems
from finetune.model.loading.architecture import load_model_config
from finetune.model.loading.config_values import positions_of
from finetune.model.loading.dry_run import dry_run_model, may_have_experts, meta_model, table_size
from finetune.model.loading.pretrained import ADAPTER_CONFIG, base_mismatch_warning, load_named, read_adapter_config
from finetune.model.size import precision_warnings
from finetune.registry.model_choices import ATTENTIONS, is_prompt_type
from finetune.registry.tasks import TASKS
from finetune.runtime.distributed import run_on_rank_0
from finetune.runtime.optional import lazily
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER
from finetune.task.model_inputs import is_padding_free, unwrap_model
from finetune.task.router_loss import find_routers

with lazily():
    from finetune.model.adapters import targets


AdapterConfig = Mapping[str, Any] | None
"""The content of an adapter_config.json."""

LAYOUT, PADDING_FREE = "batches", "padding-free"
"""The key in a checkpoint of a run whose samples share rows that older versions padded."""


def resolve_padding_free(config: RunConfig, *, model: Any = None, adapter: AdapterConfig = None) -> DataSection:
    """Return `data:` with `auto` of `padding_free` and `length_window_steps` resolved, the same on every rank.

    It depends on the job, on the model's config and on the checkpoint that the run resumes from: a resumed run lays
    its samples out as before, also where only newer versions know the model. `model` is the config of a model in place
    of the job's, with its adapter.
    """
    data, batching = config.data, config.data.batching
    is_free = batching.padding_free
    if is_free == "auto":
        is_free = batching.by != "packs" and why_padded(config, model=model, adapter=adapter) is None
    steps = batching.length_window_steps
    if steps == "auto":
        is_sorted = batching.by == "samples" and not is_free and TASKS[config.task.name].has_tokens
        steps = 1 if is_sorted else 0
    resolved = {"padding_free": is_free, "length_window_steps": steps}
    return data.model_copy(update={"batching": batching.model_copy(update=resolved)})


def format_padding_free(config: RunConfig, data: DataSection) -> tuple[str, ...]:
    """Return what `auto` has come to and why, where the task leaves a choice."""
    is_chosen = config.data.batching.padding_free != "auto" or data.batching.by == "packs"
    if is_chosen or not TASKS[config.task.name].may_share_rows:
        return ()
    if data.batching.padding_free is True:
        return ("padding-free batches: the model keeps the samples of a row apart",)
    sorting = ", and sorted by length within each step" if data.batching.length_window_steps == 1 else ""
    return (f"samples are padded{sorting}: {why_padded(config)}",)


def why_padded(config: RunConfig, *, model: Any = None, adapter: AdapterConfig = None) -> str | None:
    """Return why samples are padded where the user leaves the choice; None if they share rows."""
    attention = config.model.attention
    if not TASKS[config.task.name].may_share_rows:
        return f"`task: {config.task.name}` pads"
    if ATTENTIONS[attention].masks_whole_rows:
        return f"`model.attention: {attention}` needs a mask of the whole row. Write `auto`"
    if adapter is None and config.model.adapter is not None:
        path = Path(config.model.adapter).expanduser() / ADAPTER_CONFIG
        adapter = read_adapter_config(path.parent) if path.is_file() else None
    if config.model.trains_prompt or is_prompt_type(str((adapter or {}).get("peft_type", "")).lower()):
        return "samples in one row would share what the adapter prepends to the text"
    try:
        own = load_model_config(config.model) if model is None else model
        section = config.task.distillation
        configs = [own]
        if section is not None:
            configs.append(load_named(AutoConfig, section.teacher, key=TEACHER_KEY, section=config.model))
    except ModelError:
        return "the model cannot be loaded"  # loading it raises the error
    if (reason := next(filter(None, map(padding_reason, configs)), None)) is not None:
        return reason
    if text_config(own).model_type in OWN_ATTENTION_TYPES and attention != "auto":
        return f"`model.attention: {attention}` does not keep samples of this model apart. Write `auto`"
    if model is None and _was_once_padded(config.task.name, own) and _resumes_padded(config):
        return (
            "the checkpoint that the run resumes from is of a run that padded them. To pack them from here on, which "
            "changes losses within rounding and dropout, write `data.batching.padding_free: true`"
        )
    return None


def recorded_layout(config: RunConfig) -> Mapping[str, str]:
    """Return the layout that checkpoints of this run record; empty if it is the same in every version."""
    batching = resolve_padding_free(config).batching
    if batching.padding_free is not True or not _was_once_padded(config.task.name, load_model_config(config.model)):
        return {}
    return {LAYOUT: PADDING_FREE}


def _was_once_padded(task: str, own: Any) -> bool:
    """Return whether older versions pad this task, or the samples of this model."""
    return not TASKS[task].may_be_packed or text_config(own).model_type not in PACKED_FROM_THE_FIRST


def _resumes_padded(config: RunConfig) -> bool:
    """Return whether the run resumes from a checkpoint whose run, in an older version, padded its samples."""
    resume = config.checkpoint.resume
    if resume == "never" or is_url(config.run.folder) or is_url(resume):
        return False
    newest = layout.newest_checkpoint(Path(config.run.folder) / CHECKPOINTS_FOLDER)
    path = newest if resume == "auto" else Path(resume)
    try:
        return path is not None and read_manifest_of_step(path).run.origin.get(LAYOUT) != PADDING_FREE
    except (CheckpointError, OSError):
        return False  # resuming raises the error


def recorded_parameters(config: RunConfig) -> frozenset[str]:
    """Return the names of the parameters in the checkpoint that a run with LoRA resumes from; else none. Collective."""
    if config.model.lora is None or config.checkpoint.resume == "never":
        return frozenset()
    resume, folder = config.checkpoint.resume, Path(config.run.folder) / CHECKPOINTS_FOLDER
    is_named = resume != "auto" and not is_url(resume)
    return run_on_rank_0(lambda: parameters_in(Path(resume) if is_named else layout.newest_checkpoint(folder)))


def parameters_in(path: Path | None) -> frozenset[str]:
    """Return the names of the parameters in a checkpoint; none if it cannot be read: loading raises the error."""
    if path is None:
        return frozenset()
    try:
        index = read_metadata(path, read_manifest_of_step(path)).index
    except (CheckpointError, OSError):
        return frozenset()
    return frozenset(entry["name"] for entry in index.values())


def model_warnings(config: RunConfig, model: Any) -> Iterator[str]:
    """Yield what to log about precision, kernels, offloading and a base that an adapter was not trained on."""
    section, train = config.model, config.train
    for warning in precision_warnings(
        dtype=section.dtype,
        is_lora=adapter_of(config) is not None,
        modules_to_save=section.lora.modules_to_save if section.lora else (),
        uses_stochastic_rounding=train.optimizer.stochastic_rounding,
        state_dtype=train.optimizer.state_dtype,
    ):
        yield f"warning: {warning}"
    if section.attention == "auto" and is_padding_free(resolve_padding_free(config).batching):
        of_model = unwrap_model(model).config
        missing = missing_kernel_warning(
            is_half=computes_in_half(config),
            has_sinks=has_sinks(of_model),
            of_flash_alone=needs_flash_attention(of_model),
        )
        if missing:
            yield f"warning: {missing}"
    if section.activation_offload and section.gradient_checkpointing == "selective":
        yield (
            "warning: model.activation_offload: only the inputs of layers are offloaded, because "
            "`gradient_checkpointing: selective` keeps what it saves on the device. Write `true` or `false` instead."
        )
    mismatch = base_mismatch_warning(section.adapter, name=section.name) if section.adapter else None
    if mismatch:
        yield mismatch


def computes_in_half(config: RunConfig) -> bool:
    """Return whether forward passes compute in 16 bits."""
    return config.train.precision != "fp32" or config.model.dtype != "float32"


def stored_method_note(loaded: LoadedConfig, *, strategy: str) -> Iterator[str]:
    """Yield what to log about weights that are stored quantized; raises ConfigError if they cannot be trained so."""
    section, model = loaded.config.model, load_model_config(loaded.config.model)
    loaded.refuse(stored_problems(model, section, strategy=strategy))
    if (method := stored_method(model)) is not None and section.quantization is None:
        plain = f"trained as plain ones in {section.dtype} (`model.dtype`)"
        yield f"model.name: weights are stored in {method}, and {plain}"


_KEY = re.compile(r"(model\.(?:from_config|config|rope_scaling)(?:\.\w+)*): (.*)", re.DOTALL)


def require_buildable(loaded: LoadedConfig) -> None:
    """Raise ModelError where the job's model cannot be built, or cannot be called; takes no memory for weights.

    Where a value of `model.from_config` or `model.config` is the reason, it is a ConfigError with its line.
    """
    try:
        dry_run_model(loaded.config.model, head=TASKS[loaded.config.task.name].head)
    except ModelError as error:
        named = _KEY.fullmatch(str(error))
        if named is None:
            raise
        key, message = named.groups()
        written = next((parent for parent in (key, *parent_keys(key)) if parent in loaded.sources), key)
        text = message if written == key else f"{key.removeprefix(written).lstrip('.')}: {message}"
        loaded.refuse([Problem(written, text)])


def expert_target_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield why LoRA cannot adapt this model's experts and router as requested."""
    section, requested = config.model, config.model.lora
    if requested is None:
        return
    names_experts = requested.experts is not None or requested.router
    if names_experts or (computes_from_weights(section) and may_have_experts(section)):
        yield from targets.target_problems(meta_model(section, head=TASKS[config.task.name].head), requested)


def is_merged(config: RunConfig) -> bool:
    """Return whether the export is a whole model that an adapter is merged into."""
    return config.export.merge and adapter_of(config) is not None


def require_valid_merge(config: RunConfig, *, strategy: str | None = None) -> None:
    """Raise ModelError where a merge at the end would be wrong, or impossible under the launched strategy."""
    section = config.model
    if not is_merged(config) or section.quantization is None:
        return
    if section.lora is not None and section.lora.init == "loftq":
        raise ModelError(
            "export.merge: an adapter of `init: loftq` corrects the quantization error of its base, so it must not be "
            "merged into the unquantized base. Leave `merge` out, or write another `model.lora.init`."
        )
    if strategy == "zero3":
        raise ModelError(
            "export.merge: under ZeRO-3 the unquantized base cannot be loaded on one process. Leave `merge` out, and "
            "run `finetune export RUN --merge` afterwards."
        )


def require_model_positions(loaded: LoadedConfig) -> str | None:
    """Return a warning where `data.max_length` is more than the model's positions; None if it is not.

    Raises ConfigError where a longer sample would fail, or change what the others of its batch give. Reads no weights.
    """
    config, key = loaded.config, "data.max_length"
    positions = positions_of(load_model_config(config.model)) if config.data.max_length is not None else None
    if positions is None:
        return None
    longest, rope_type = config.data.longest, positions.by_length
    evaluated = config.train.microbatch_size if config.evaluate is None else config.evaluate.microbatch_size
    has_single_rows = {config.train.microbatch_size, evaluated or config.train.microbatch_size} == {1}
    is_alone = (  # each sample has a forward pass of its own, whose frequencies then follow from its length
        rope_type == "longrope"
        and config.data.batching.by == "samples"
        and has_single_rows
        and TASKS[config.task.name].may_be_packed
    )
    if rope_type is not None and longest > positions.same_up_to and not is_alone:
        alone = "; or write `data.batching.by: samples` with 1 for `microbatch_size`" if rope_type == "longrope" else ""
        message = (
            f"with `rope_type: {rope_type}`, a sample of more than {positions.same_up_to:,} tokens changes the rotary "
            "embedding of all others in its forward pass, so that the loss would depend on how samples are batched. "
            f"Write at most {positions.same_up_to:,}{alone}."
        )
        loaded.refuse([Problem(key, message)])
    if not positions.is_rotary and longest > positions.number - _MAX_UNUSED_POSITIONS:
        table = table_size(meta_model(config.model, head=TASKS[config.task.name].head))
        if table is not None and longest > table:
            loaded.refuse([Problem(key, f"the model has only {table:,} positions. Write at most {table:,}.")])
    if not positions.is_rotary or longest <= positions.number or rope_type is not None:
        return None
    return (
        f"{key} is {longest:,}, and the model was made for {positions.number:,} positions: longer samples are beyond "
        f"what it has seen. Write {positions.number:,}, or scale its positions with `model.rope_scaling`."
    )


_MAX_UNUSED_POSITIONS = 8
"""Positions that a table may have before the first one."""


_ROUTER_COEFFICIENT = "router_aux_loss_coef"
"""What transformers calls the coefficient in a model's config."""


def router_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield which keys are about routers that the model does not have, or that are not understood."""
    asked = {
        "train.router_aux_loss": config.train.router_aux_loss is not None,
        "report.expert_load": config.report.expert_load,
    }
    keys = [key for key, is_asked in asked.items() if is_asked]
    if not keys:
        return
    model = meta_model(config.model, head=TASKS[config.task.name].head)
    name = f"`{model.config.model_type}`"
    try:
        if not find_routers(model):
            yield from (
                Problem(key, f"{name} has no routers: it is not a mixture of experts. Remove it.") for key in keys
            )
            return
    except ModelError as error:
        yield from (Problem(key, f"{name} is not supported: {error}. Remove it.") for key in keys)
        return
    if config.train.router_aux_loss == "auto" and not own_router_coefficient(model.config):
        yield Problem(
            keys[0], f"the config of {name} has no `{_ROUTER_COEFFICIENT}` above 0. Write a number, such as 0.001."
        )


def own_router_coefficient(model_config: Any) -> float:
    """Return the coefficient in the model's config, 0 if it has none."""
    return float(getattr(model_config.get_text_config(), _ROUTER_COEFFICIENT, None) or 0.0)
