"""A dry run of the model: it is built on the meta device and called once, to detect invalid config values early."""

import inspect
import logging
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedConfig, PreTrainedModel

from finetune.config.sections.model import ModelSection
from finetune.errors import ModelError
from finetune.model.loading.architecture import (
    FROM_CONFIG_KEY,
    HEADS,
    SEQ2SEQ_HEAD,
    TEXT_CONFIG,
    SpecialTokenIds,
    build_model_config,
    check_decoder_start,
    config_value_errors,
    load_pretrained_config,
    values_key,
)
from finetune.model.loading.config_values import BY_LENGTH, CONFIG_KEY, ROPE
from finetune.model.loading.pretrained import build_from_config

_MAX_MODULES = 300_000
_MAX_PARAMETERS = 10**13
_TIMEOUT_SECONDS = 60.0
_ALARM_INTERVAL_SECONDS = 0.5  # between alarms after the timeout
_MAX_VOCABULARY = 1 << 22
_MAX_REAL_PARAMETERS = 10**8
"""The maximum number of parameters of a model that can be built with values within a second or two."""

_LENGTH = 8  # of the test input in tokens


def dry_run_model(section: ModelSection, *, head: str) -> None:
    """Raise ModelError if the model cannot be built with the values in its config, or if its forward pass fails.

    It is built on the meta device, which takes neither memory nor time. The tokenizer's vocabulary and special tokens
    are not known yet and are assumed to be valid.
    """
    with _build_limits(section):
        config = _assumed_config(section)
        with torch.device("meta"):
            model = _build(section, config, head=head)
        empty = [f"{name} {list(weight.shape)}" for name, weight in model.named_parameters() if weight.numel() == 0]
        if empty:
            raise ModelError(f"{values_key(section)}: the model would have empty parameters: {', '.join(empty[:3])}.")
        total = sum(parameter.numel() for parameter in model.parameters())
        if total == 0 or total > _MAX_PARAMETERS:
            raise ModelError(f"{values_key(section)}: the model would have {total:,} parameters. Write other values.")
        if head == SEQ2SEQ_HEAD:
            check_decoder_start(model)
        auto_class = HEADS[head]
        if not is_remote_code(model) and type(model.config) not in auto_class._model_mapping:
            raise ModelError(
                f"{auto_class.__name__} builds only the text part of this model, `{model.config.model_type}`, and "
                "transformers cannot load that from an exported folder. Use another model."
            )
        _check_changes(model, section, head=head)
        error = forward_error(model)
        if error is not None and total <= _MAX_REAL_PARAMETERS:  # some code does not support the meta device
            error = forward_error(_build(section, config, head=head))
            if error is not None:
                raise error


def _check_changes(model: PreTrainedModel, section: ModelSection, *, head: str) -> None:
    """Raise ModelError for values of `model.config` that the pre-trained weights do not fit, or the code ignores."""
    if not section.config_changes:
        return

    def built_with(values: Mapping[str, Any]) -> PreTrainedModel:
        config = load_pretrained_config(section.model_copy(update={"config": dict(values), "rope_scaling": None}))
        with torch.device("meta"):
            return _build(section, config, head=head)

    unchanged = built_with({})
    if _shapes(model) != _shapes(unchanged):
        for name, value in section.config_changes.items():
            key = f"{CONFIG_KEY}.{name}"
            with suppress(Exception):  # where the model cannot even be built with only this value
                if _shapes(built_with({name: value})) == _shapes(unchanged):
                    continue
            break
        raise ModelError(
            f"{key}: it changes the number or the shapes of the weights, so that the pre-trained ones do not fit. "
            "Remove it, or build a new model with `model.from_config`."
        )
    names = rope_names(section.config_changes)
    if not names or is_remote_code(model):
        return
    parameters = [getattr(built.config.get_text_config(), ROPE, None) for built in (unchanged, model)]
    if parameters[0] != parameters[1] and not uses_scaling(model, unchanged):
        key = CONFIG_KEY if section.rope_scaling is None else "model"
        raise ModelError(f"{key}.{names[0]}: it has no effect on `{model.config.model_type}`. Remove it.")


def _shapes(model: PreTrainedModel) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in model.named_parameters()}


def meta_model(section: ModelSection, *, head: str) -> PreTrainedModel:
    """Return the model on the meta device: its modules, without values; raises ModelError."""
    with _build_limits(section):
        config = _assumed_config(section)
        with torch.device("meta"):
            return _build(section, config, head=head)


def may_have_experts(section: ModelSection) -> bool:
    """Return whether the model's config has values about experts, as every mixture of experts does."""
    return any("expert" in name for name in _assumed_config(section).get_text_config().to_dict())


def _assumed_config(section: ModelSection) -> PreTrainedConfig:
    """Return the model's config, with the largest vocabulary that its tokenizer may have."""
    written = section.from_config
    if written is None:
        return load_pretrained_config(section)
    text_values = written.values.get(TEXT_CONFIG)
    if section.tokenizer is None:
        vocabulary_size = None
    elif "vocab_size" in (text_values if isinstance(text_values, dict) else written.values):
        vocabulary_size = 1  # the written one takes precedence
    else:
        trained = section.tokenizer.train
        vocabulary_size = _MAX_VOCABULARY if trained is None else trained.vocabulary_size
    special_ids = SpecialTokenIds(bos=0, eos=0, pad=0)
    config = build_model_config(written, vocabulary_size=vocabulary_size, special_ids=special_ids)
    text = config.get_text_config()
    size = getattr(text, "vocab_size", None)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        value = getattr(text, name, None)
        if isinstance(size, int) and isinstance(value, int) and value >= max(size, 1):
            raise ModelError(
                f"{FROM_CONFIG_KEY}.values.{name}: {value} is outside the vocabulary of {size:,}. Remove it: the "
                "tokenizer sets it."
            )
    num_layers = getattr(text, "num_hidden_layers", None)
    if isinstance(num_layers, int) and num_layers < 0:  # transformers 5.17 builds a model without layers
        raise ModelError(f"{FROM_CONFIG_KEY}.values.num_hidden_layers: {num_layers} is negative.")
    return config


def _build(section: ModelSection, config: PreTrainedConfig, *, head: str) -> PreTrainedModel:
    """Return the model on the default device."""
    model: PreTrainedModel = build_from_config(
        HEADS[head], config, dtype=torch.float32, trust_remote_code=section.trust_remote_code
    )
    return model.eval()  # dropout would read values, which the meta device lacks


def forward_error(model: PreTrainedModel) -> Exception | None:
    """Return the exception of a forward pass; None if it succeeds."""
    config: Any = model.config
    device = next(model.parameters()).device
    if model.main_input_name == "pixel_values":
        side = getattr(config, "image_size", None) or 224
        height, width = (side, side) if isinstance(side, int) else tuple(side)[:2]
        inputs = {"pixel_values": torch.zeros(1, getattr(config, "num_channels", 3), height, width, device=device)}
    else:
        ids = torch.zeros(1, _LENGTH, dtype=torch.long, device=device)
        end, size = (getattr(config.get_text_config(), name, None) for name in ("eos_token_id", "vocab_size"))
        if isinstance(end, int) and isinstance(size, int) and 0 < end < size:
            ids[:, -1] = end  # T5 and BART classify a text at this token
        inputs = {"input_ids": ids, "decoder_input_ids": ids} if config.is_encoder_decoder else {"input_ids": ids}
    disabled_level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # about the dummy input
    try:
        with torch.no_grad():
            model(**inputs)
    except Exception as error:
        return error
    finally:
        logging.disable(disabled_level)
    return None


@contextmanager
def _build_limits(section: ModelSection) -> Iterator[None]:
    """Raise ModelError if the model cannot be built in this context, has too many modules, or takes too long.

    The random state is restored.
    """
    key = values_key(section)
    num_modules, deadline = 0, time.monotonic() + _TIMEOUT_SECONDS

    def count(module: nn.Module, name: str, inner: nn.Module | None) -> None:
        nonlocal num_modules
        num_modules += 1
        if num_modules > _MAX_MODULES:
            raise ModelError(f"{key}: the model would have more than {_MAX_MODULES:,} modules. Write fewer layers.")
        if time.monotonic() > deadline:
            raise_timeout()

    def raise_timeout(*_: Any) -> None:
        raise ModelError(f"{key}: building the model takes more than {_TIMEOUT_SECONDS:.0f} s. Write smaller values.")

    handle: Any = register_module_module_registration_hook(count)
    has_alarm = threading.current_thread() is threading.main_thread()
    if has_alarm:  # repeated, since Python ignores exceptions raised in finalizers
        previous_handler = signal.signal(signal.SIGALRM, raise_timeout)
        previous_timer = signal.setitimer(signal.ITIMER_REAL, _TIMEOUT_SECONDS, _ALARM_INTERVAL_SECONDS)
    name = str(section.name) if section.from_config is None else section.from_config.model_type
    try:
        with config_value_errors(name, key=key), torch.random.fork_rng(devices=()):
            yield
    finally:
        if has_alarm:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, previous_handler)
            signal.setitimer(signal.ITIMER_REAL, *previous_timer)
        handle.remove()


def table_size(model: PreTrainedModel) -> int | None:
    """Return the number of learned positions; None if positions are not learned."""
    sizes = []
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        is_position = ("position" in last and "relative" not in last) or last == "wpe"
        if isinstance(module, nn.Embedding) and is_position and not ("vision" in name or "visual" in name):
            first = getattr(module, "offset", 0) or (0 if module.padding_idx is None else module.padding_idx + 1)
            sizes.append(module.num_embeddings - first)
    return min(sizes, default=None)


def rope_names(values: Mapping[str, Any]) -> list[str]:
    """Return the names of the values that change rotary embeddings, including those in a text config."""
    inner = [name for value in values.values() if isinstance(value, Mapping) for name in rope_names(value)]
    return [name for name in values if name in ("rope_scaling", ROPE, "rope_theta")] or inner


def is_remote_code(model: PreTrainedModel) -> bool:
    """Return whether the model's code came with its weights."""
    return not type(model).__module__.startswith("transformers.")


def uses_scaling(model: PreTrainedModel, unscaled: PreTrainedModel) -> bool:
    """Return whether the rotary embeddings of the models differ; both may be on the meta device."""
    if getattr(model.config, "alibi", False) is True:  # biases attention scores instead of rotating
        return False
    scaled = _frequencies(model)
    types = [values["rope_type"] for values in scaled.values()]
    used = [one for types_of in types for one in (types_of.values() if isinstance(types_of, dict) else [types_of])]
    return scaled != _frequencies(unscaled) or any(rope_type in BY_LENGTH for rope_type in used)


def _frequencies(model: PreTrainedModel) -> dict[str, dict[str, Any]]:
    """Return frequencies, scale and type of each rotary embedding."""
    frequencies: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        buffers = [buffer for buffer, _ in module.named_buffers(recurse=False) if "inv_freq" in buffer]
        config = getattr(module, "config", None)
        if not buffers or not isinstance(config, PreTrainedConfig):
            continue
        if "config" not in inspect.signature(type(module).__init__).parameters:
            continue
        with torch.device("cpu"):
            real = type(module)(config=config)
        values = {buffer: getattr(real, buffer).tolist() for buffer in buffers}
        values |= {key: value for key, value in vars(real).items() if key.endswith("attention_scaling")}
        frequencies[name] = {**values, "rope_type": getattr(real, "rope_type", None)}
    return frequencies
