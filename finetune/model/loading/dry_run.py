"""A dry run of the model: it is built on the meta device and called once, to detect invalid config values early."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedConfig, PreTrainedModel

from finetune.config.sections.model import FromConfigSection, ModelSection
from finetune.errors import ModelError
from finetune.model.loading.architecture import (
    FROM_CONFIG_KEY,
    HEADS,
    SEQ2SEQ_HEAD,
    TEXT_CONFIG,
    SpecialTokenIds,
    build_model_config,
    check_decoder_start,
    load_pretrained_config,
    model_build_errors,
    values_key,
)
from finetune.model.loading.config_values import CONFIG_KEY
from finetune.model.loading.pretrained import build_from_config
from finetune.model.loading.rope import is_remote_code, rope_names, rotary_parameters, uses_scaling

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
    trial = _DryRun(section, head)
    with model_build_errors(section, model_type=trial.name), _build_limits(section), torch.random.fork_rng(devices=()):
        config = trial.config()
        with torch.device("meta"):
            model = trial.model(config)
        empty = [f"{name} {list(shape)}" for name, shape in _shapes(model).items() if shape.numel() == 0]
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
        _check_same_shapes(model, trial)
        _check_rope_is_used(model, trial)
        error = forward_error(model)
        if error is not None and (confirmed := _confirmed_error(error, trial, config, model)):
            raise confirmed


def _check_same_shapes(model: PreTrainedModel, trial: "_DryRun") -> None:
    """Raise ModelError for a value of `model.config` with which the pre-trained weights would not fit."""
    values = trial.section.config_changes
    if not values:
        return
    unchanged = trial.shapes({})
    if unchanged == _shapes(model):
        return
    for name, value in values.items():
        try:
            fits = trial.shapes({name: value}) == unchanged
        except Exception:  # the model cannot even be built with only this value
            fits = False
        if not fits:
            raise ModelError(
                f"{CONFIG_KEY}.{name}: it changes the number or the shapes of the weights, so that the pre-trained "
                "ones do not fit. Remove it, or build a new model with `model.from_config`."
            )
    raise ModelError(f"{CONFIG_KEY}: these values together change the shapes of the weights. Remove them.")


def _check_rope_is_used(model: PreTrainedModel, trial: "_DryRun") -> None:
    """Raise ModelError for a scaling of rotary embeddings that the model's code ignores."""
    names = rope_names(trial.section.config_changes)
    if not names or is_remote_code(model):
        return
    unchanged = trial.section.model_copy(update={"config": {}, "rope_scaling": None})
    with torch.device("meta"):
        unscaled = trial.model(load_pretrained_config(unchanged))
    if rotary_parameters(unscaled.config) != rotary_parameters(model.config) and not uses_scaling(model, unscaled):
        key = CONFIG_KEY if trial.section.rope_scaling is None else "model"
        raise ModelError(f"{key}.{names[0]}: it has no effect on `{model.config.model_type}`. Remove it.")


def _shapes(model: PreTrainedModel) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def meta_model(section: ModelSection, *, head: str) -> PreTrainedModel:
    """Return the model on the meta device: its modules, without values; raises ModelError."""
    trial = _DryRun(section, head)
    with model_build_errors(section, model_type=trial.name), _build_limits(section), torch.random.fork_rng(devices=()):
        config = trial.config()
        with torch.device("meta"):
            return trial.model(config)


def may_have_experts(section: ModelSection) -> bool:
    """Return whether the model's config has values about experts, as every mixture of experts does."""
    return any("expert" in name for name in _DryRun(section, "causal_lm").config().get_text_config().to_dict())


@dataclass(frozen=True)
class _DryRun:
    """The section and head to build."""

    section: ModelSection
    head: str

    @property
    def name(self) -> str:
        """Return the name of the model for messages."""
        section = self.section
        return section.from_config.model_type if section.from_config is not None else str(section.name)

    def config(self) -> PreTrainedConfig:
        """Return the model's config."""
        written = self.section.from_config
        if written is None:
            return load_pretrained_config(self.section)
        size = _vocabulary_size(self.section, written)
        config = build_model_config(written, vocabulary_size=size, special_ids=SpecialTokenIds(bos=0, eos=0, pad=0))
        _check_special_token_ids(config)
        num_layers = getattr(config.get_text_config(), "num_hidden_layers", None)
        if isinstance(num_layers, int) and num_layers < 0:  # transformers 5.17 builds a model without layers
            raise ModelError(f"{FROM_CONFIG_KEY}.values.num_hidden_layers: {num_layers} is negative.")
        return config

    def shapes(self, values: Mapping[str, Any]) -> dict[str, torch.Size]:
        """Return the names and shapes of the parameters with these values of `model.config` instead."""
        section = self.section.model_copy(update={"config": dict(values), "rope_scaling": None})
        with torch.device("meta"):
            return _shapes(self.model(load_pretrained_config(section)))

    def model(self, config: PreTrainedConfig) -> PreTrainedModel:
        """Return the model on the default device."""
        model: PreTrainedModel = build_from_config(
            HEADS[self.head], config, dtype=torch.float32, trust_remote_code=self.section.trust_remote_code
        )
        return model.eval()  # dropout would read values, which the meta device lacks


def _vocabulary_size(section: ModelSection, written: FromConfigSection) -> int | None:
    """Return the maximum size of the tokenizer; 1 if the values set a vocabulary size, which then takes precedence."""
    if section.tokenizer is None:
        return None
    text = written.values.get(TEXT_CONFIG)
    if "vocab_size" in (text if isinstance(text, dict) else written.values):
        return 1
    return section.tokenizer.train.vocabulary_size if section.tokenizer.train is not None else _MAX_VOCABULARY


def _check_special_token_ids(config: PreTrainedConfig) -> None:
    """Raise ModelError for a special token outside the vocabulary."""
    text = config.get_text_config()
    size = getattr(text, "vocab_size", None)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        value = getattr(text, name, None)
        if isinstance(size, int) and isinstance(value, int) and value >= max(size, 1):
            raise ModelError(
                f"{FROM_CONFIG_KEY}.values.{name}: {value} is outside the vocabulary of {size:,}. Remove it: the "
                "tokenizer sets it."
            )


def forward_error(model: PreTrainedModel) -> Exception | None:
    """Return the exception of a forward pass; None if it succeeds."""
    disabled_level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # about the dummy input
    try:
        with torch.no_grad():
            model(**_inputs(model))
    except Exception as error:
        return error
    finally:
        logging.disable(disabled_level)
    return None


def _inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    config: Any = model.config
    device = next(model.parameters()).device
    if model.main_input_name == "pixel_values":
        side = getattr(config, "image_size", None) or 224
        height, width = (side, side) if isinstance(side, int) else tuple(side)[:2]
        return {"pixel_values": torch.zeros(1, getattr(config, "num_channels", 3), height, width, device=device)}
    ids = torch.zeros(1, _LENGTH, dtype=torch.long, device=device)
    end, size = (getattr(config.get_text_config(), name, None) for name in ("eos_token_id", "vocab_size"))
    if isinstance(end, int) and isinstance(size, int) and 0 < end < size:
        ids[:, -1] = end  # T5 and BART classify a text at this token
    return {"input_ids": ids, "decoder_input_ids": ids} if config.is_encoder_decoder else {"input_ids": ids}


def _confirmed_error(
    error: Exception, trial: _DryRun, config: PreTrainedConfig, model: PreTrainedModel
) -> Exception | None:
    """Return the error unless it is caused by the meta device, which some code does not support.

    A small model is built with real values; a large one is compared with the default config on the meta device.
    """
    if sum(parameter.numel() for parameter in model.parameters()) <= _MAX_REAL_PARAMETERS:
        return forward_error(trial.model(config))
    with torch.device("meta"):
        default_config = type(config)()
        default_config.pad_token_id = config.pad_token_id  # if set, the model searches `input_ids` for it
        default = trial.model(default_config)
    return error if forward_error(default) is None else None


@contextmanager
def _build_limits(section: ModelSection) -> Iterator[None]:
    """Raise ModelError if the model has too many modules or takes too long to build."""
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
    try:
        with _alarm(raise_timeout) if threading.current_thread() is threading.main_thread() else nullcontext():
            yield
    finally:
        handle.remove()


@contextmanager
def _alarm(raise_timeout: Callable[..., None]) -> Iterator[None]:
    """Call `raise_timeout` repeatedly after the timeout: Python ignores exceptions raised in finalizers."""
    previous_handler = signal.signal(signal.SIGALRM, raise_timeout)
    previous_timer = signal.setitimer(signal.ITIMER_REAL, _TIMEOUT_SECONDS, _ALARM_INTERVAL_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous_handler)
        signal.setitimer(signal.ITIMER_REAL, *previous_timer)
