"""The model that a job names: weights, adapters, and which of its parameters are trained."""

import math
import re
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import read_manifest_of_step
from finetune.checkpoint.format.metadata import read_metadata
from finetune.config.load import LoadedConfig
from finetune.config.paths import is_url
from finetune.config.rules.model import adapter_of
from finetune.config.run_config import RunConfig
from finetune.config.section import parent_keys, with_location
from finetune.config.sections.model import ModelSection
from finetune.errors import CheckpointError, ConfigError, ModelError, Problem
from finetune.model.activations import offload_activations
from finetune.model.adapters.context import AdapterContext, adapter_config, has_adapter
from finetune.model.attention.supported_models import has_sinks
from finetune.model.attention.varlen_kernels import missing_kernel_warning
from finetune.model.batch_norm import set_batch_norm
from finetune.model.freeze import freeze, train_only
from finetune.model.loading.architecture import SpecialTokenIds, load_model_config
from finetune.model.loading.dry_run import dry_run_model, may_have_experts, meta_model
from finetune.model.loading.load import load_model
from finetune.model.loading.pretrained import base_mismatch_warning, read_saved_adapter_config
from finetune.model.loading.rope import positions_of, table_size
from finetune.model.quantize import stored_method, stored_problems, unquantized_weights_folder
from finetune.model.size import precision_warnings
from finetune.model.tokenizer import add_embedding_rows, new_token_ids
from finetune.registry.tasks import TASKS
from finetune.run.setup.padding_free import resolve_padding_free
from finetune.runtime.distributed import run_on_rank_0
from finetune.runtime.optional import lazily
from finetune.runtime.parameters import InitContext
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER
from finetune.task.model_inputs import is_padding_free, unwrap_model
from finetune.task.protocol import Task
from finetune.task.router_loss import find_routers

with lazily():
    from finetune.model.adapters import build, lora, single_pass, targets


def build_model(
    config: RunConfig,
    *,
    task: Task,
    tokenizer: PreTrainedTokenizerBase | None,
    init_context: InitContext,
    recorded: Collection[str] = (),
) -> Any:
    """Return the model as it is before its first step. Collective under ZeRO-3.

    `recorded`: the names of the parameters in the checkpoint that will be loaded into it. A checkpoint of an older
    version has adapters where peft chose to add them.
    """
    model = _build_trainable(config, task=task, tokenizer=tokenizer, init_context=init_context, recorded=recorded)
    if config.model.activation_offload:
        offload_activations(model)
    return model


def _build_trainable(
    config: RunConfig,
    *,
    task: Task,
    tokenizer: PreTrainedTokenizerBase | None,
    init_context: InitContext,
    recorded: Collection[str],
) -> Any:
    section, seed = config.model, config.run.seed
    if _computes_from_weights(section):
        init_context = replace(init_context, device=None)  # on the CPU, so that initial values do not depend on devices
    if section.quantization is not None:
        init_context = replace(
            init_context, context=nullcontext, on_meta_device=False
        )  # Accelerate sends no packed weights
    ids = () if section.new_tokens is None or tokenizer is None else new_token_ids(tokenizer, section.new_tokens)
    model: Any = load_model(
        section,
        head=task.head,
        init_context=init_context,
        seed=seed,
        vocabulary_size=None if tokenizer is None else len(tokenizer) - len(ids),
        special_ids=None if tokenizer is None else _special_ids(tokenizer),
        head_values=task.head_values,
    )
    set_batch_norm(model, section.batch_norm, is_new=section.from_config is not None)
    if section.new_tokens is not None and tokenizer is not None:
        add_embedding_rows(model, tokenizer, section.new_tokens, seed=seed, init_context=init_context)
    adapter = adapter_config(section)
    if adapter is not None:
        adapter_context = AdapterContext(
            seed=seed,
            head=task.head,
            revision=section.revision,
            init_context=init_context,
            tokenizer=tokenizer,
            new_ids=ids,
            base=unquantized_weights_folder(section),
            recorded=recorded,
        )
        adapted = build.add_adapter(model, adapter, adapter_context)
        single_pass.use_single_pass(adapted, in_place=section.gradient_checkpointing != "selective")
        return adapted
    freeze(model, section.freeze)
    train_only(model, section.train_only)
    return model


def recorded_parameters(config: RunConfig) -> frozenset[str]:
    """Return the names of the parameters in the checkpoint that a run with LoRA resumes from; else none. Collective."""
    if config.model.lora is None or config.checkpoint.resume == "never":
        return frozenset()
    resume, folder = config.checkpoint.resume, Path(config.run.folder) / CHECKPOINTS_FOLDER
    is_named = resume != "auto" and not is_url(resume)
    return run_on_rank_0(lambda: parameters_in(Path(resume) if is_named else layout.newest_checkpoint(folder)))


def parameters_in(path: Path | None) -> frozenset[str]:
    """Return the names of the parameters in a checkpoint; none where it cannot be read: loading raises the error."""
    if path is None:
        return frozenset()
    try:
        index = read_metadata(path, read_manifest_of_step(path)).index
    except (CheckpointError, OSError):
        return frozenset()
    return frozenset(entry["name"] for entry in index.values())


def _computes_from_weights(section: ModelSection) -> bool:
    """Return whether initial values are computed from the loaded ones."""
    requested = section.lora
    has_factors_of_weights = requested is not None and (requested.dora or requested.init not in ("default", "gaussian"))
    return has_factors_of_weights or section.new_tokens is not None or section.prompt_tuning is not None


def adapter_summary_of(model: Any) -> tuple[str, ...]:
    """Return the line on what LoRA adapts in a mixture of experts; none for a model that it does not concern."""
    line = lora.adapter_summary(model) if has_adapter(model) else None
    return () if line is None else (line,)


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
        has_attention_sinks = has_sinks(unwrap_model(model).config)
        missing = missing_kernel_warning(is_half=computes_in_half(config), has_sinks=has_attention_sinks)
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


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> SpecialTokenIds:
    return SpecialTokenIds(bos=tokenizer.bos_token_id, eos=tokenizer.eos_token_id, pad=tokenizer.pad_token_id)


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
        raise ConfigError([with_location(Problem(written, text), loaded.sources)], loaded.path.name) from error


def require_trainable_weights(loaded: LoadedConfig, *, strategy: str = "") -> str | None:
    """Return a line about weights that are stored quantized; None for plain ones. Reads no weights.

    Raises ConfigError where they cannot be trained as the job says.
    """
    section = loaded.config.model
    if section.name is None:
        return None
    model = load_model_config(section)
    problems = [
        with_location(problem, loaded.sources) for problem in stored_problems(model, section, strategy=strategy)
    ]
    if problems:
        raise ConfigError(problems, loaded.path.name)
    method = stored_method(model)
    if method is None or section.quantization is not None:
        return None
    return f"model.name: weights are stored in {method}, and trained as plain ones in {section.dtype} (`model.dtype`)"


def require_adaptable(loaded: LoadedConfig, *, strategy: str = "") -> None:
    """Raise ConfigError where LoRA cannot adapt this model's experts and router as requested. Reads no weights."""
    problems = [with_location(problem, loaded.sources) for problem in _adapter_problems(loaded.config, strategy)]
    if problems:
        raise ConfigError(problems, loaded.path.name)


def _adapter_problems(config: RunConfig, strategy: str) -> Iterator[Problem]:
    section, requested, is_fsdp1 = config.model, config.model.lora, strategy == "fsdp1"
    if section.adapter is not None and is_fsdp1:
        if read_saved_adapter_config(Path(section.adapter)).get("target_parameters"):
            yield Problem("model.adapter", f"{_NO_PARAMETERS}.")
        return
    if requested is None:
        return
    names_experts = requested.experts is not None or requested.router
    if not names_experts and not ((is_fsdp1 or _computes_from_weights(section)) and may_have_experts(section)):
        return
    model = meta_model(section, head=TASKS[config.task.name].head)
    yield from targets.target_problems(model, requested)
    if is_fsdp1 and (key := targets.key_with_folded_parameters(model, requested)) is not None:
        yield Problem(f"model.lora.{key}", f"{_NO_PARAMETERS}, or write `{key}: false`.")


_NO_PARAMETERS = (
    "adapters of routers, and of experts that are not grouped products, do not work under fsdp1, which replaces "
    "parameters by plain tensors in the forward pass, where peft looks for parameters (ParamWrapper in peft 0.21). "
    "Launch with accelerate_configs/fsdp2.yaml"
)


def require_positions(loaded: LoadedConfig) -> str | None:
    """Return a warning where `data.max_length` is more than the model's positions; None where it is not.

    Raises ConfigError where a longer sample would fail, or change what the others of its batch give. Reads no weights.
    """
    config, key = loaded.config, "data.max_length"
    positions = positions_of(load_model_config(config.model)) if config.data.max_length is not None else None
    if positions is None:
        return None
    longest, rope_type = config.data.longest, positions.by_length
    if rope_type is not None and longest > positions.same_up_to and not _is_alone(config, rope_type):
        alone = "; or write `data.batching.by: samples` with 1 for `microbatch_size`" if rope_type == "longrope" else ""
        raise _problem(
            f"with `rope_type: {rope_type}`, a sample of more than {positions.same_up_to:,} tokens changes the rotary "
            "embedding of all others in its forward pass, so that the loss would depend on how samples are batched. "
            f"Write at most {positions.same_up_to:,}{alone}.",
            loaded,
        )
    if not positions.is_rotary and longest > positions.number - _MAX_UNUSED_POSITIONS:
        table = table_size(meta_model(config.model, head=TASKS[config.task.name].head))
        if table is not None and longest > table:
            raise _problem(f"the model has only {table:,} positions. Write at most {table:,}.", loaded)
    if not positions.is_rotary or longest <= positions.number or rope_type is not None:
        return None
    values = f"rope_scaling: {{rope_type: yarn, factor: {math.ceil(longest / positions.trained)}.0}}"
    is_new = config.model.from_config is not None
    scaling = f"`{values}` in `model.from_config.values`" if is_new else f"`model.{values}`"
    return (
        f"{key} is {longest:,}, and the model was made for {positions.number:,} positions: longer samples are beyond "
        f"what it has seen. Write {positions.number:,}, or scale its positions: {scaling}."
    )


_MAX_UNUSED_POSITIONS = 8
"""Positions that a table may have before the first one."""


def _is_alone(config: RunConfig, rope_type: str) -> bool:
    """Return whether each sample has a forward pass of its own, whose frequencies then are those of its length."""
    evaluated = None if config.evaluate is None else config.evaluate.microbatch_size
    sizes = {config.train.microbatch_size, evaluated or config.train.microbatch_size}
    is_one = config.data.batching.by == "samples" and sizes == {1}
    return rope_type == "longrope" and is_one and TASKS[config.task.name].may_be_packed


def _problem(message: str, loaded: LoadedConfig) -> ConfigError:
    return ConfigError([with_location(Problem("data.max_length", message), loaded.sources)], loaded.path.name)


_ROUTER_COEFFICIENT = "router_aux_loss_coef"
"""What transformers calls the coefficient in a model's config."""


def require_routers(loaded: LoadedConfig) -> None:
    """Raise ConfigError where a key is about routers that the model does not have, or that are not understood."""
    problems = [with_location(problem, loaded.sources) for problem in _router_problems(loaded.config)]
    if problems:
        raise ConfigError(problems, loaded.path.name)


def router_coefficient(written: float | str | None, model_config: Any) -> float | None:
    """Return the coefficient of the routers' balance loss; None for no such loss. `auto` is the model's own."""
    return _own_coefficient(model_config) if isinstance(written, str) else written


def _router_problems(config: RunConfig) -> Iterator[Problem]:
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
    if config.train.router_aux_loss == "auto" and not _own_coefficient(model.config):
        yield Problem(
            keys[0], f"the config of {name} has no `{_ROUTER_COEFFICIENT}` above 0. Write a number, such as 0.001."
        )


def _own_coefficient(model_config: Any) -> float:
    """Return the coefficient in the model's config, 0 where it has none."""
    return float(getattr(model_config.get_text_config(), _ROUTER_COEFFICIENT, None) or 0.0)
