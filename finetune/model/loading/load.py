"""Loads the model by hub name, from a folder, or from its config with random weights.

A rank that receives its weights later builds the modules on the meta device and materializes uninitialized weights.
Random weights are a pure function of (seed, module name): the same on every rank and under every strategy.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from finetune.config.sections.model import ModelSection
from finetune.errors import ModelError
from finetune.model.activations import enable_gradient_checkpointing
from finetune.model.attention.implementation import default_attention, requested_attention
from finetune.model.frozen_models import dequantize_while_loading, quantization_config, stored_method
from finetune.model.layers import unused_modules
from finetune.model.loading.architecture import (
    HEAD_PARAMETERS_IN_BODY,
    HEADS,
    NEW_HEADS,
    SEQ2SEQ_HEAD,
    SpecialTokenIds,
    build_model_config,
    check_decoder_start,
    config_value_errors,
    load_pretrained_config,
    pretrained_arguments,
    set_config_values,
    values_key,
)
from finetune.model.loading.hub import is_local_path, loading_errors
from finetune.model.loading.pretrained import build_from_config, check_no_missing_weights, load_weights, placed_on
from finetune.model.upstream import (
    allow_missing_embeddings,
    disable_cpu_repacking,
    initialize_marked,
    keep_own_no_split_modules,
    skip_weight_init,
    unify_tied_embeddings,
)
from finetune.runtime.parameters import InitContext
from finetune.runtime.seeds import derive_seed
from finetune.runtime.upstream import without_hub_retries


def load_model(
    section: ModelSection,
    *,
    head: str,
    init_context: InitContext,
    seed: int,
    vocabulary_size: int | None,
    special_ids: SpecialTokenIds | None = None,
    head_values: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Return the model in training mode with the requested head, dtype and attention; raises ModelError.

    `head_values` are config values set by the task; `vocabulary_size` is None without a tokenizer. Random weights
    depend only on `seed` and module names. A rank that builds on the meta device gets uninitialized parameters and
    downloads no weights. Collective under ZeRO-3.
    """
    config = _model_config(section, vocabulary_size=vocabulary_size, special_ids=special_ids, values=head_values)
    if section.from_config is None and not init_context.on_meta_device:
        model, new = _load_pretrained(config, section=section, head=head, init_context=init_context)
        if new:
            initialize_weights(model, seed=seed, gather=init_context.gather, only=new)
    else:
        model = _build_model(config, section=section, head=head, init_context=init_context)
        if not init_context.on_meta_device:
            initialize_weights(model, seed=seed, gather=init_context.gather)
    if head == SEQ2SEQ_HEAD:
        check_decoder_start(model)
    if vocabulary_size is not None and (size := model.config.get_text_config().vocab_size) < vocabulary_size:
        raise ModelError(
            f"model.tokenizer: the tokenizer has {vocabulary_size} tokens, but the model only {size} embeddings. "
            "Use the model's own tokenizer."
        )
    return _prepare_for_training(model, section=section)


def _model_config(
    section: ModelSection,
    *,
    vocabulary_size: int | None,
    special_ids: SpecialTokenIds | None,
    values: Mapping[str, Any] | None,
) -> PreTrainedConfig:
    if section.from_config is None:
        config = load_pretrained_config(section)
    else:
        special_ids = special_ids or SpecialTokenIds()
        config = build_model_config(section.from_config, vocabulary_size=vocabulary_size, special_ids=special_ids)
    set_config_values(config, values or {})
    return config


def _build_model(
    config: PreTrainedConfig, *, section: ModelSection, head: str, init_context: InitContext
) -> PreTrainedModel:
    """Return the model with uninitialized weights, which take no memory on a rank that builds on the meta device.

    A pre-trained model's have the dtypes that loading gives them: a rank that receives its values must have the
    same as rank 0, since tensors of another size cannot be received.
    """
    dtype = getattr(torch, section.dtype)
    with (
        config_value_errors(config.model_type, key=values_key(section)),
        torch.random.fork_rng(devices=()),
        init_context.context(),
        skip_weight_init(),
    ):
        model: PreTrainedModel = build_from_config(
            HEADS[head],
            config,
            dtype=dtype,
            attn_implementation=requested_attention(section.attention) or default_attention(config),
            trust_remote_code=section.trust_remote_code,
        )
    if init_context.on_meta_device:  # parameters on the CPU, which take no physical memory until the weights arrive
        materialized: dict[nn.Parameter, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    if parameter not in materialized:
                        empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                        materialized[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                    module._parameters[name] = materialized[parameter]
        meta_buffers = [name for name, buffer in model.named_buffers() if buffer.is_meta]
        assert not meta_buffers, f"buffers must be built with their values, but {meta_buffers} are on the meta device"
        model.tie_weights()  # a context that moves parameters to the meta device one by one unties them
    if section.from_config is not None:
        return model
    # Some models keep a few tensors in float32 regardless of the requested dtype, as T5 in float16 (`_get_dtype_plan`
    # of transformers 5.23, which building from a config ignores).
    plan: Mapping[str, torch.dtype] = getattr(model, "_get_dtype_plan", lambda _: {})(dtype)
    for module_name, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            full_name = f"{module_name}.{name}" if module_name else name
            kept = next((dtype for key, dtype in plan.items() if re.search(key.replace("*", ".*"), full_name)), None)
            if tensor is not None and kept is not None and name not in module._non_persistent_buffers_set:
                tensor.data = tensor.data.to(kept)
    return model


def load_empty_model(
    section: ModelSection,
    *,
    head: str,
    vocabulary_size: int | None,
    special_ids: SpecialTokenIds | None = None,
    head_values: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Return the model as `load_model` does, but on the meta device, from its config, without reading weights.

    Weights that would be quantized have their unquantized shapes.
    """
    config = _model_config(section, vocabulary_size=vocabulary_size, special_ids=special_ids, values=head_values)
    empty = InitContext(context=lambda: torch.device("meta"))
    return _prepare_for_training(_build_model(config, section=section, head=head, init_context=empty), section=section)


def _load_pretrained(
    config: PreTrainedConfig, *, section: ModelSection, head: str, init_context: InitContext
) -> tuple[PreTrainedModel, frozenset[str]]:
    """Return the model, and the parameters of a head that is not in the weights on disk."""
    name, origin = str(section.name), pretrained_arguments(section)
    may_be_new = head in NEW_HEADS
    quantization = quantization_config(section)
    # transformers puts quantized weights on the current device in any case, and knows how stored ones are quantized
    placement = placed_on(init_context.device) if quantization is None else {}
    if quantization is not None and stored_method(config) is None:
        placement = {"quantization_config": quantization}
    dequantize_while_loading(config)
    with (
        loading_errors(name, key="model.name"),
        without_hub_retries(is_local=is_local_path(name)),
        init_context.context(),
    ):
        model, loading = load_weights(
            HEADS[head],
            **origin,
            config=config,
            dtype=getattr(torch, section.dtype),
            attn_implementation=requested_attention(section.attention) or default_attention(config),
            ignore_mismatched_sizes=may_be_new,
            output_loading_info=True,
            **placement,
        )
    if quantization is not None:
        disable_cpu_repacking(model)
    absent = {*loading["missing_keys"], *(name for name, *_ in loading.get("mismatched_keys", ()))}
    unused = tuple(f"{module}." for module in unused_modules(model))  # their parameters are never read
    body = f"{model.base_model_prefix}."
    new = frozenset(
        name
        for name in absent
        if name.startswith(unused)
        or (may_be_new and (not name.startswith(body) or name.removeprefix(body).startswith(HEAD_PARAMETERS_IN_BODY)))
    )
    check_no_missing_weights({"missing_keys": absent - new}, name, key="model.name")
    return model, new


def _prepare_for_training(model: PreTrainedModel, *, section: ModelSection) -> PreTrainedModel:
    allow_missing_embeddings(model)
    if torch.cuda.is_available():
        keep_positions_exact(model)
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    if inputs is not None and outputs is not None:
        model.config.tie_word_embeddings = inputs.weight is outputs.weight
    for name in unused_modules(model):
        model.get_submodule(name).requires_grad_(False)
    unify_tied_embeddings(model)
    keep_own_no_split_modules(model)
    model.config.use_cache = False  # generation enables its cache through generation_config
    if section.gradient_checkpointing:
        enable_gradient_checkpointing(model, section.gradient_checkpointing)
    return model.train()


Gather = Callable[[Sequence[nn.Parameter]], AbstractContextManager[Any]]


def initialize_weights(
    model: PreTrainedModel, *, seed: int, gather: Gather, only: frozenset[str] | None = None
) -> None:
    """Initialize all weights by the model's own rules, each module with its own seed, in float32 on the CPU.

    With `only`, just the weights with these names. Does not change torch's random state. `gather` gathers partitioned
    parameters while they are written. Collective if `gather` is.
    """
    tied = frozenset(getattr(model, "all_tied_weights_keys", ()))
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        for name, module, owner in _children_first(model, name="", owner=model):
            written = dict.fromkeys(module.parameters(recurse=False))
            for child in module.children():  # in some models `_init_weights` of a module also writes to its children
                if not isinstance(child, PreTrainedModel):
                    written.update(dict.fromkeys(child.parameters(recurse=False)))
            parameters = list(written)
            prefix = f"{name}." if name else ""
            own = {prefix + own_name: parameter for own_name, parameter in module.named_parameters(recurse=False)}
            excluded = [parameter for full, parameter in own.items() if only is not None and full not in only]
            if only is not None and len(excluded) == len(own):
                continue
            # another module, to which they are tied, has initialized them already
            excluded += [parameter for full, parameter in own.items() if full in tied]
            with gather(parameters) if parameters else nullcontext(), as_cpu_float32(parameters):
                torch.default_generator.manual_seed(derive_seed(seed, "weights", name))
                for parameter in excluded:  # transformers' initializers skip parameters with this flag
                    parameter._is_hf_initialized = True  # type: ignore[attr-defined]
                owner._init_weights(module)
                for parameter in set(excluded):
                    del parameter._is_hf_initialized  # type: ignore[attr-defined]
                initialize_marked(module)


@contextmanager
def as_cpu_float32(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Move the parameters to float32 on the CPU in this context; afterwards their own storage has the values.

    Random numbers then depend neither on device nor on dtype: a bfloat16 weight is the rounded float32 one. Parameters
    without values are left alone.
    """
    filled = [p for p in parameters if not p.is_meta]
    elsewhere = [p for p in filled if p.dtype != torch.float32 or p.device.type != "cpu"]
    storages = [p.data for p in elsewhere]
    for parameter in elsewhere:
        parameter.data = parameter.data.to(device="cpu", dtype=torch.float32)
    yield
    for parameter, storage in zip(elsewhere, storages, strict=True):
        storage.copy_(parameter.data)
        parameter.data = storage


def _children_first(
    module: nn.Module, *, name: str, owner: PreTrainedModel
) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Yield every module after its children, with the model whose rules apply to it (in the order of transformers)."""
    for child_name, child in module.named_children():
        child_owner = child if isinstance(child, PreTrainedModel) else owner
        yield from _children_first(child, name=f"{name}.{child_name}" if name else child_name, owner=child_owner)
    yield name, module, owner


def keep_positions_exact(model: nn.Module) -> None:
    """Compute the angles of rotary positions without TF32, which represents few positions above 2,048 exactly.

    transformers computes them as a float32 matrix product of frequencies and positions, to which TF32 would apply.
    """
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            switch = _ExactProducts()
            module.register_forward_pre_hook(switch.enter)
            module.register_forward_hook(switch.leave, always_call=True)


class _ExactProducts:
    """Disables TF32 during a module's forward."""

    _previous = "highest"

    def enter(self, *_: Any) -> None:
        self._previous = torch.get_float32_matmul_precision()
        if self._previous != "highest":
            torch.set_float32_matmul_precision("highest")

    def leave(self, *_: Any) -> None:
        if self._previous != "highest":
            torch.set_float32_matmul_precision(self._previous)
