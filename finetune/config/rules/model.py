"""Rules of `model:`: weights, tokenizer, adapters, quantization and new tokens; and of the trackers in `report:`."""

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

from finetune.config.formatting import did_you_mean, format_list
from finetune.config.run_config import RunConfig
from finetune.config.section import join_key
from finetune.config.sections.model import ADAPTER_KEYS
from finetune.errors import Problem
from finetune.registry.model_choices import PEFT_TYPES
from finetune.registry.observers import TRACKERS
from finetune.registry.tasks import TASKS, tasks_where

MAX_LAYERS = 2_000
"""Maximum number of layers; building a layer takes a few milliseconds."""

_MAX_INTEGER = 1 << 63

_POSITION_VALUES = ("rope_scaling", "rope_parameters", "max_position_embeddings", "original_max_position_embeddings")
"""Values of a model's config that `model.rope_scaling` sets."""


def adapter_of(config: RunConfig) -> str | None:
    """Return the kind of adapter that is configured; None where the model's own weights are trained."""
    return next((name for name in ADAPTER_KEYS if getattr(config.model, name) is not None), None)


def trained_dtypes(config: RunConfig) -> frozenset[str]:
    """Return the dtypes of trained weights: float32 for adapters, `model.dtype` for `modules_to_save`."""
    if adapter_of(config) is None:
        return frozenset({config.model.dtype})
    lora = config.model.lora
    return frozenset({"float32", *([config.model.dtype] if lora and lora.modules_to_save else [])})


def positions_are_scaled_once(config: RunConfig) -> Iterator[Problem]:
    """The values that `model.rope_scaling` sets are not also in `model.config`."""
    if config.model.rope_scaling is None:
        return
    for key in _position_keys(config.model.config, key="model.config"):
        yield Problem(key, "it is already set by `model.rope_scaling`. Keep only one of them.")


def _position_keys(values: dict[str, Any], *, key: str) -> Iterator[str]:
    for name, value in values.items():
        if name in _POSITION_VALUES:
            yield join_key(key, name)
        elif isinstance(value, dict) and name.endswith("_config"):
            yield from _position_keys(value, key=join_key(key, name))


def compile_fits_the_model(config: RunConfig) -> Iterator[Problem]:
    """A compiled forward pass keeps no state between batches and has no hooks, by which router losses are read."""
    if config.model.compile == "full" and config.train.embedding_noise:
        message = "embedding noise is added by a hook, which `full` would also compile. Write `regional`."
        yield Problem("model.compile", message)
    if config.model.compile in ("regional", "full") and isinstance(config.model.batch_norm, int):
        message = "batch norms over groups of samples keep sums between batches. Write `off`, or `batch_norm: frozen`."
        yield Problem("model.compile", message)
    for key, is_set in (
        ("train.router_aux_loss", config.train.router_aux_loss is not None),
        ("report.expert_load", config.report.expert_load),
    ):
        if is_set and config.model.compile in ("regional", "full"):
            message = f"router outputs cannot be read in a compiled model (`model.compile: {config.model.compile}`)."
            yield Problem(key, f"{message} Remove this key, or write `model.compile: off`.")


def model_and_tokenizer_are_given(config: RunConfig) -> Iterator[Problem]:
    """Model and tokenizer have an origin. A model from a config has no tokenizer, and a trained one no processor."""
    if config.model.name is None and config.model.from_config is None:
        message = "no model is given. Write `name` (hub name or folder) or `from_config` (random weights)."
        yield Problem("model", message)
    tokenizer, task = config.model.tokenizer, TASKS[config.task.name]
    if tokenizer is None:
        if config.model.from_config is not None and task.has_tokens:
            message = "a model built from its config has no tokenizer. Add `model.tokenizer` with `name` or `train`."
            yield Problem("model.from_config", message)
    elif tokenizer.name is None and tokenizer.train is None:
        yield Problem("model.tokenizer", "no tokenizer is given. Write `name` or `train`.")
    elif tokenizer.train is not None and task.reads == "both":
        message = "a tokenizer alone cannot process images. Write `name`: a model, or a folder with its processor."
        yield Problem("model.tokenizer.train", message)


def trackers_are_known(config: RunConfig) -> Iterator[Problem]:
    """Trackers are supported by Accelerate."""
    for index, name in enumerate(config.report.trackers):
        if name not in TRACKERS:
            hint = did_you_mean(name, TRACKERS.choices) or f"Supported: {format_list(TRACKERS.choices)}."
            yield Problem(f"report.trackers.{index}", f"the tracker `{name}` is not supported. {hint}")


def config_values_are_in_range(config: RunConfig) -> Iterator[Problem]:
    """Numbers in a model's config fit into 64 bits; dropout is between 0 and 1, layers are limited in number."""
    written = config.model.from_config
    sections = {"model.from_config.values": written.values if written else {}, "model.config": config.model.config}
    for key, number in chain.from_iterable(_numbers(values, key=section) for section, values in sections.items()):
        if isinstance(number, float) and math.isnan(number):
            yield Problem(key, "NaN is not allowed. Write a number.")
        elif isinstance(number, int) and abs(number) >= _MAX_INTEGER:
            yield Problem(key, f"{number} does not fit into 64 bits. Write a smaller number.")
        elif "dropout" in key.rpartition(".")[2] and not 0 <= number <= 1:
            yield Problem(key, f"{number:g} is not a probability. Write a number from 0 to 1.")
        elif isinstance(number, int) and "layer" in key.rpartition(".")[2] and number > MAX_LAYERS:
            yield Problem(key, f"{number:,} layers are too many to build. Write at most {MAX_LAYERS:,}.")


def _numbers(value: Any, *, key: str) -> Iterator[tuple[str, int | float]]:
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(inner, key=join_key(key, name))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value


INITS_FROM_BASE = ("pissa", "olora")


def prompt_adapters_fit(config: RunConfig) -> Iterator[Problem]:
    """Prompt adapters prepend to each sample, in a model that predicts tokens."""
    section, batching = config.model.peft, config.data.batching
    if section is None or not config.model.trains_prompt:
        return
    length = section.values.get("num_virtual_tokens")
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        yield Problem("model.peft.values", "it needs the number of learned tokens. Write `num_virtual_tokens: 16`.")
    if not isinstance(section.values.get("prompt_tuning_init_text", ""), str):
        yield Problem("model.peft.values.prompt_tuning_init_text", "it is not a text. Write some words, or remove it.")
    if not TASKS[config.task.name].takes_prompt_adapters:
        message = f"only {format_list(tasks_where('takes_prompt_adapters'))} support it. Use `model.lora`."
        yield Problem("model.peft.type", message)
    if batching.by == "packs" or batching.padding_free is True:
        key = "by" if batching.by == "packs" else "padding_free"
        message = "packed samples would share one learned prompt. Write `data.batching.by: samples`."
        yield Problem(f"data.batching.{key}", message)
    if section.type == "prefix_tuning" and config.model.gradient_checkpointing:
        message = "prefix tuning stores keys and values in a cache, which recomputed layers do not read. Write `false`."
        yield Problem("model.gradient_checkpointing", message)
    is_seq2seq = TASKS[config.task.name].head == "seq2seq_lm"
    if is_seq2seq and config.evaluate is not None and config.evaluate.generate is not None:
        message = f"generation with an encoder-decoder ignores `{section.type}`. Remove `generate`."
        yield Problem("evaluate.generate", message)


def lora_init_fits(config: RunConfig) -> Iterator[Problem]:
    """Initializations from the base's weights need weights that can be split and merged exactly."""
    lora, quantization = config.model.lora, config.model.quantization
    if lora is None:
        return
    if lora.init in INITS_FROM_BASE:
        changed = f"`{lora.init}` changes the base's weights,"
        if quantization is not None:
            yield Problem("model.lora.init", f"{changed} which are quantized. Write `loftq`, or `default`.")
        if config.model.dtype != "float32":
            message = f"{changed} which `{config.model.dtype}` would round. Write `dtype: float32`."
            yield Problem("model.lora.init", message)
    if lora.dora and lora.init in (*INITS_FROM_BASE, "loftq"):
        message = f"its magnitudes would not match the weights after `{lora.init}`. Write `init: default`."
        yield Problem("model.lora.dora", message)
    if lora.init == "loftq" and (quantization is None or quantization.method != "bitsandbytes"):
        message = "`loftq` needs a base quantized by bitsandbytes. Add `model.quantization`, or write `init: default`."
        yield Problem("model.lora.init", message)


def quantization_is_supported(config: RunConfig) -> Iterator[Problem]:
    """Only pre-trained, frozen weights are quantized; torchao supports 8 bits and some kinds of adapters."""
    quantization, kind = config.model.quantization, adapter_of(config)
    if quantization is None:
        return
    if kind is None:
        message = "quantized weights cannot be trained. Add `model.lora`, or remove it."
        yield Problem("model.quantization", message)
    if config.model.from_config is not None:
        yield Problem("model.quantization", "random weights cannot be quantized. Use `model.name`.")
    if quantization.method == "torchao" and quantization.bits == 4:
        message = "torchao's 4-bit kernels do not run on every device. Write `bits: 8`, or `method: bitsandbytes`."
        yield Problem("model.quantization.bits", message)
    if quantization.method == "torchao" and kind == "peft" and not config.model.trains_prompt:
        yield Problem("model.peft", "peft does not support it on torchao weights. Use `model.lora`.")


def peft_type_can_be_trained(config: RunConfig) -> Iterator[Problem]:
    """The type of another adapter is one that trains weights, and that is merged only if that is exact."""
    section = config.model.peft
    if section is None:
        return
    entry = PEFT_TYPES.get(section.type)
    if entry is not None and entry.refusal:
        yield Problem("model.peft.type", f"`{section.type}`: {entry.refusal}.")
    elif config.export.merge and not (entry is not None and (entry.is_merged_exactly or entry.is_prompt)):
        names = format_list(each.name for each in PEFT_TYPES if each.is_merged_exactly)
        message = f"a merge of `{section.type}` is not known to be exact; that of {names} is. Leave `merge` out."
        yield Problem("export.merge", message)
    for name in section.values:
        if name in _SET_BY_FINETUNE:
            yield Problem(f"model.peft.values.{name}", "it is set by finetune. Remove it.")
        elif entry is not None and entry.arguments and name not in entry.arguments:
            message = f"`{section.type}` is trained with {format_list(entry.arguments)} alone. Remove it."
            yield Problem(f"model.peft.values.{name}", message)


_SET_BY_FINETUNE = ("task_type", "inference_mode", "peft_type", "base_model_name_or_path", "revision", "auto_mapping")
"""Values of a config of peft that no job writes."""


def new_tokens_are_trained(config: RunConfig) -> Iterator[Problem]:
    """The embeddings of new tokens are trained: with all weights, or by LoRA."""
    section, kind = config.model.new_tokens, adapter_of(config)
    if section is None:
        return
    if not section.tokens and not section.special:
        yield Problem("model.new_tokens", "it is empty. Write `tokens` or `special`, or remove it.")
    if kind not in (None, "lora"):
        message = f"their embeddings would not be trained with `model.{kind}`. Use `model.lora`, or train all weights."
        yield Problem("model.new_tokens", message)


RULES = (
    positions_are_scaled_once,
    config_values_are_in_range,
    model_and_tokenizer_are_given,
    compile_fits_the_model,
    trackers_are_known,
    prompt_adapters_fit,
    lora_init_fits,
    quantization_is_supported,
    peft_type_can_be_trained,
    new_tokens_are_trained,
)
