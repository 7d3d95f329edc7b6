"""The model that a job names: weights, adapters, and which of its parameters are trained."""

import re
from collections.abc import Collection
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
from finetune.config.run_config import RunConfig
from finetune.config.section import parent_keys, with_location
from finetune.config.sections.model import ModelSection
from finetune.errors import CheckpointError, ConfigError, ModelError
from finetune.model.activation_offload import offload_activations
from finetune.model.adapters.context import AdapterContext, adapter_config, has_adapter
from finetune.model.batch_norm import set_batch_norm
from finetune.model.freeze import freeze, train_only
from finetune.model.loading.architecture import SpecialTokenIds
from finetune.model.loading.dry_run import dry_run_model, may_have_experts, meta_model
from finetune.model.loading.load import load_model
from finetune.model.new_tokens import add_embedding_rows, new_token_ids
from finetune.model.quantize import unquantized_weights_folder
from finetune.runtime.distributed import run_on_rank_0
from finetune.runtime.optional import lazily
from finetune.runtime.parameters import InitContext
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER
from finetune.task.protocol import Task
from finetune.task.registry import model_head

with lazily():
    from finetune.model.adapters import build, lora, targets


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
    init_context = _init_context(section, init_context)
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
    wish = adapter_config(section)
    if wish is not None:
        ground = AdapterContext(
            seed=seed,
            head=task.head,
            revision=section.revision,
            init_context=init_context,
            tokenizer=tokenizer,
            new_ids=ids,
            base=unquantized_weights_folder(section),
            recorded=recorded,
        )
        return build.add_adapter(model, wish, ground)
    freeze(model, section.freeze)
    train_only(model, section.train_only)
    return model


def _init_context(section: ModelSection, init_context: InitContext) -> InitContext:
    """Return the context as the job's initial values and quantized weights need it."""
    if _computes_from_weights(section):
        init_context = replace(init_context, device=None)  # on the CPU, so that initial values do not depend on devices
    if section.quantization is not None:
        init_context = replace(
            init_context, context=nullcontext, on_meta_device=False
        )  # Accelerate sends no packed weights
    return init_context


def recorded_parameters(config: RunConfig) -> frozenset[str]:
    """Return the names of the parameters in the checkpoint that a run with LoRA resumes from; else none. Collective."""
    if config.model.lora is None or config.checkpoint.resume == "never":
        return frozenset()
    resume, folder = config.checkpoint.resume, Path(config.run.folder) / CHECKPOINTS_FOLDER
    is_named = resume != "auto" and not is_url(resume)
    return run_on_rank_0(lambda: parameters_in(Path(resume) if is_named else layout.newest_checkpoint(folder)))


def parameters_in(path: Path | None) -> frozenset[str]:
    """Return the names of the parameters in a checkpoint; none where it cannot be read, which loading it says."""
    if path is None:
        return frozenset()
    try:
        index = read_metadata(path, read_manifest_of_step(path)).index
    except (CheckpointError, OSError):
        return frozenset()
    return frozenset(entry["name"] for entry in index.values())


def _computes_from_weights(section: ModelSection) -> bool:
    """Tell whether initial values are computed from the loaded ones."""
    wanted = section.lora
    has_factors_of_weights = wanted is not None and (wanted.dora or wanted.init not in ("default", "gaussian"))
    return has_factors_of_weights or section.new_tokens is not None or section.prompt_tuning is not None


def adapter_summary_of(model: Any) -> tuple[str, ...]:
    """Return the line on what LoRA adapts in a mixture of experts; none for a model that it does not concern."""
    line = lora.adapter_summary(model) if has_adapter(model) else None
    return () if line is None else (line,)


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> SpecialTokenIds:
    return SpecialTokenIds(bos=tokenizer.bos_token_id, eos=tokenizer.eos_token_id, pad=tokenizer.pad_token_id)


_KEY = re.compile(r"model\.(?:from_config|config)(?:\.\w+)*")


def require_buildable(loaded: LoadedConfig) -> None:
    """Raise ModelError, with the line of its key, where the job's model cannot be built, or not be asked anything.

    Takes no memory for weights.
    """
    try:
        dry_run_model(loaded.config.model, head=model_head(loaded.config.task.name))
    except ModelError as error:
        named = _KEY.match(str(error))
        keys = () if named is None else (named.group(), *parent_keys(named.group()))
        place = next((loaded.sources[key] for key in keys if key in loaded.sources), None)
        if place is None:
            raise
        raise ModelError(f"{place}, {error}") from error


def require_adaptable(loaded: LoadedConfig) -> None:
    """Raise ConfigError where LoRA cannot be had as asked on this model's experts and router. Reads no weights."""
    section, wanted = loaded.config.model, loaded.config.model.lora
    if wanted is None:
        return
    names_experts = wanted.experts is not None or wanted.router
    if not names_experts and not (_computes_from_weights(section) and may_have_experts(section)):
        return
    model = meta_model(section, head=model_head(loaded.config.task.name))
    problems = targets.target_problems(model, wanted)
    if problems:
        raise ConfigError([with_location(each, loaded.sources) for each in problems], loaded.path.name)
