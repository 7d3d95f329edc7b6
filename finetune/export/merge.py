"""Merges adapters into the base weights in float64 on the CPU, one layer per core at a time.

`W + BA * scale` (and the formulas of DoRA, AdaLoRA, IA3 and OFT) is computed by peft's own layers on float64 values
and rounded once, to the written dtype. The model is copied only once, for the result.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn

from finetune.errors import ModelError, TrainingError
from finetune.export.weights import build_meta_model, check_shapes, map_in_threads, num_threads_for, unwrap_adapter
from finetune.model.adapters.build import peft_state_dict_names
from finetune.model.adapters.context import ADAPTER_NAME, base_parameter_name
from finetune.model.adapters.lora import INITIAL_FACTORS, as_plain_lora
from finetune.model.adapters.targets import keep_targets, rewritten_names, shortest_names

MERGEABLE = frozenset({"LORA", "ADALORA", "IA3", "OFT", "TRAINABLE_TOKENS", "LOHA", "LOKR"})
"""The adapter types, by peft's names, that can be merged exactly."""

_WORKING_COPIES = 3
"""Float64 copies of a layer's weight during its merge: the weight, the adapter's share, and a temporary."""

_NamedTensors = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class Merged:
    """The weights of the merged model by name."""

    weights: Mapping[str, Tensor]
    has_untied_weights: bool  # tied weights that now differ because one of them was adapted


def require_mergeable(model: PeftModel) -> None:
    """Raise ModelError with the reason if the model's adapter cannot be merged."""
    adapter_type = str(model.peft_config[ADAPTER_NAME].peft_type.value)
    if model.peft_config[ADAPTER_NAME].is_prompt_learning:
        raise ModelError(
            f"export.merge: {adapter_type.lower().replace('_', ' ')} trains virtual tokens or keys and does not change "
            "weights, so there is nothing to merge. Remove `merge` and load the adapter with peft."
        )
    if adapter_type not in MERGEABLE:
        supported = ", ".join(sorted(MERGEABLE))
        raise ModelError(f"export.merge: adapters of type {adapter_type} cannot be merged. Supported: {supported}.")


def merge(model: PeftModel, weights: Mapping[str, Tensor], *, dtype: torch.dtype | None) -> Merged:
    """Return the base's weights with the adapter merged in, in `dtype`, or if None, in the dtypes of the base.

    Only classes and configs are taken from `model`. `weights` has all values of adapter and base by canonical name, the
    base's under peft's names or its own; integers keep their dtype. Raises ModelError for an adapter that cannot be
    merged, TrainingError if a value is missing or not finite.
    """
    require_mergeable(model)
    # peft derives values of some adapters from sizes: theirs are real
    config = model.peft_config[ADAPTER_NAME]
    meta_model = _build_meta_peft_model(model, config, dtype=torch.float32, is_on_meta=False).eval()
    merges = list(_module_merges(meta_model.base_model.model, "", _Values(meta_model, weights, dtype=dtype)))
    layers = (module for module in meta_model.modules() if isinstance(module, BaseTunerLayer))
    sizes = (sum(parameter.numel() for parameter in layer.parameters()) for layer in layers)
    largest: int = max(0, *sizes, *(parameter.numel() for parameter in meta_model.parameters()))
    threads = num_threads_for(_WORKING_COPIES * 8 * largest)
    results = map_in_threads(lambda merge_module: merge_module(), merges, num_threads=threads)
    merged = {name: value for tensors in results for name, value in tensors}
    groups: dict[int, list[Tensor]] = {}  # of weights that are tied in the plain model
    for name, tensor in build_meta_model(unwrap_adapter(model), dtype=torch.float32).state_dict(keep_vars=True).items():
        if name in merged:
            groups.setdefault(id(tensor), []).append(merged[name])
    has_untied_weights = any(
        other is not group[0] and not torch.equal(other, group[0]) for group in groups.values() for other in group[1:]
    )
    return Merged(merged, has_untied_weights)


def _build_meta_peft_model(model: PeftModel, config: PeftConfig, *, dtype: torch.dtype, is_on_meta: bool) -> PeftModel:
    """Return the base on the meta device with an adapter of this config, which is there, too, if `is_on_meta`.

    `low_cpu_mem_usage` unties what the adapter ties (`init_empty_weights` of accelerate 1.15), so it is tied again.
    """
    config = copy.deepcopy(config)
    config.base_model_name_or_path = None
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # other initializations read values, which the meta device lacks
    base = build_meta_model(unwrap_adapter(model), dtype=dtype)
    with torch.device("meta") if is_on_meta else nullcontext(), keep_targets():
        meta_model = get_peft_model(base, config, low_cpu_mem_usage=True)
    if getattr(config, "ensure_weight_tying", False):
        inputs, head = base.get_input_embeddings(), base.get_output_embeddings()
        if isinstance(head, ModulesToSaveWrapper):
            head.modules_to_save[ADAPTER_NAME].weight = inputs.modules_to_save[ADAPTER_NAME].weight
    return meta_model


class _Values:
    """The values of the meta model's parameters and buffers; tied ones may be given under any one of their names."""

    def __init__(self, meta_model: PeftModel, weights: Mapping[str, Tensor], *, dtype: torch.dtype | None) -> None:
        self._weights = weights
        self._dtype = dtype
        self._names: dict[int, list[str]] = {}
        for name, tensor in meta_model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(tensor), []).append(name)
        for name, buffer in meta_model.named_buffers(remove_duplicate=False):
            self._names.setdefault(id(buffer), []).append(name)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the value of a meta tensor; raises TrainingError if it was not given, or with another shape."""
        names = self._names[id(tensor)]
        for name in (alias for peft_name in names for alias in (peft_name, base_parameter_name(peft_name))):
            if name in self._weights:
                value = self._weights[name]
                if value.shape != tensor.shape:
                    raise TrainingError(
                        f"export: `{name}` has the shape {tuple(value.shape)} instead of {tuple(tensor.shape)}. "
                        "Nothing was written."
                    )
                return value
        raise TrainingError(f"export: `{names[0]}` is missing, so the adapter cannot be merged. Nothing was written.")

    def rounded(self, value: Tensor, tensor: Tensor) -> Tensor:
        """Return the value in the output dtype, by default that of the base's own value."""
        if not value.is_floating_point():
            return value
        return value.detach().to(self._dtype or self.of(tensor).dtype)

    def is_given(self, tensor: Tensor) -> bool:
        """Return whether a value was given; buffers that can be recomputed may be missing."""
        return any(
            name in self._weights or base_parameter_name(name) in self._weights for name in self._names[id(tensor)]
        )


def _module_merges(module: nn.Module, path: str, values: _Values) -> Iterator[Callable[[], _NamedTensors]]:
    """Yield a function per module that returns the plain model's parameters and given buffers, merged, by name."""
    if isinstance(module, ModulesToSaveWrapper):
        saved = module.modules_to_save[ADAPTER_NAME]  # its values replace the base's
        yield partial(_own_tensors, saved, path, values, base=module.original_module, recurse=True)
    elif isinstance(module, TrainableTokensWrapper):
        yield partial(_merged_layer, module.token_adapter, path, values)
    elif isinstance(module, BaseTunerLayer):
        yield partial(_merged_layer, module, path, values)
    else:
        yield partial(_own_tensors, module, path, values, base=module, recurse=False)
        for name, child in module.named_children():
            yield from _module_merges(child, _joined(path, name), values)


def _own_tensors(module: nn.Module, path: str, values: _Values, *, base: nn.Module, recurse: bool) -> _NamedTensors:
    """Return the values of the module's parameters, and of its buffers that were given, in the base's dtypes."""
    like = dict(_named_tensors(base, recurse=recurse))
    return [
        (_joined(path, name), values.rounded(values.of(tensor), like[name]))
        for name, tensor in _named_tensors(module, recurse=recurse)
        if isinstance(tensor, nn.Parameter) or values.is_given(tensor)
    ]


def _merged_layer(layer: nn.Module, path: str, values: _Values) -> _NamedTensors:
    """Return the merged weights of the base's layer, and its buffers that were given."""
    working = _with_values(layer, values)
    adapter: Any = working
    while isinstance(adapter, BaseTunerLayer):  # peft nests one in another for each parameter that it adapts
        adapter.merge(adapter_names=[ADAPTER_NAME])
        adapter = adapter.base_layer
    merged = dict(_base_layer(working).named_parameters())
    for name in merged:
        if not bool(torch.isfinite(merged[name]).all()):
            raise TrainingError(f"export: `{_joined(path, name)}` is not finite after merging the adapter into it.")
    base = _base_layer(layer)
    weights = [(_joined(path, name), values.rounded(merged[name], tensor)) for name, tensor in base.named_parameters()]
    given = [(name, buffer) for name, buffer in base.named_buffers() if values.is_given(buffer)]
    return [*weights, *((_joined(path, name), values.rounded(values.of(buffer), buffer)) for name, buffer in given)]


def _named_tensors(module: nn.Module, *, recurse: bool) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=recurse, remove_duplicate=False)
    yield from module.named_buffers(recurse=recurse, remove_duplicate=False)


def _with_values(layer: nn.Module, values: _Values) -> nn.Module:
    """Return a copy of the layer whose parameters have their values in float64; the meta model is unchanged."""
    working = copy.deepcopy(layer)
    for name, module in layer.named_modules():
        copied = working.get_submodule(name)
        for parameter_name, tensor in module._parameters.items():
            if tensor is not None:
                value = values.of(tensor).to("cpu", torch.float64, copy=True)
                copied._parameters[parameter_name] = nn.Parameter(value, requires_grad=False)
    return working


def _base_layer(layer: nn.Module) -> nn.Module:
    """Return the plain model's layer inside a peft layer."""
    peft_layer: Any = layer
    inner: nn.Module = peft_layer.get_base_layer()
    return inner


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def adapter_for_export(
    model: PeftModel, weights: Mapping[str, Tensor], *, dtype: torch.dtype
) -> tuple[dict[str, Tensor], PeftConfig]:
    """Return the adapter's weights under peft's names, all of them checked, and its config.

    If initialization changed the base (PiSSA, OLoRA) and the original base is elsewhere, the adapter is converted to
    one on the original. Raises TrainingError for a weight that is missing or empty.
    """
    config = copy.deepcopy(model.peft_config[ADAPTER_NAME])
    _check(weights, model, config, dtype=dtype)
    initial: Mapping[str, Tensor] = getattr(model, INITIAL_FACTORS, {})
    if initial and unwrap_adapter(model).name_or_path:
        weights, config = as_plain_lora(weights, config, initial)
    elif initial:
        config.init_lora_weights = True  # the changed base is exported next to the adapter
    meta_model, names = _check(weights, model, config, dtype=dtype)
    config = loadable_config(meta_model, config)
    config.inference_mode = True
    first = {name: peft_name for peft_name, name in reversed(names.items())}
    return {
        peft_name: weights[name].contiguous() if first[name] == peft_name else weights[name].clone()  # tied: read twice
        for peft_name, name in names.items()
    }, config


def base_weights(model: PeftModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the base's weights under the names they had before peft wrapped the modules."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if model.peft_config[ADAPTER_NAME].is_prompt_learning:
        # wraps none of the base's modules except a new head
        names = {name: name.removeprefix("base_model.").replace(".original_module.", ".") for name in weights}
    else:
        names = {name: base_parameter_name(name) for name in weights}
    return {names[name]: tensor for name, tensor in weights.items() if name not in trained}


def _check(
    weights: Mapping[str, Tensor], model: PeftModel, config: PeftConfig, *, dtype: torch.dtype
) -> tuple[PeftModel, dict[str, str]]:
    """Return the adapted model without values, and the trained weight of each of peft's names.

    Raises TrainingError unless all have their full shape.
    """
    # BOFT reads the permutations that it computes from sizes
    meta_model = _build_meta_peft_model(model, config, dtype=dtype, is_on_meta=config.peft_type != "BOFT")
    trained = {name: parameter for name, parameter in meta_model.named_parameters() if parameter.requires_grad}
    check_shapes(weights, {name: parameter.shape for name, parameter in trained.items()})
    return meta_model, peft_state_dict_names(meta_model, trained)


def loadable_config(model: PeftModel, config: Any) -> Any:
    """Return the config, changed so that plain peft adapts the same modules when it loads the adapter.

    On loading, peft replaces some module names with parameters of routed experts (`rewritten_names`). Shared experts
    and dense layers with these names are therefore targeted as parameters, `shared_experts.up_proj.weight`, with the
    same result and tensor names. Adapters of parameters cannot have dropout, which only matters in training.
    """
    if config.peft_type != "LORA":
        return config
    config = copy.deepcopy(config)
    base = model.get_base_model()
    rewritten = rewritten_names(base.config.model_type)
    layers = {
        base_parameter_name(f"{name}.").removesuffix("."): module
        for name, module in base.named_modules()
        if isinstance(module, LoraLayer) and not isinstance(module, ParamWrapper)
    }
    moved = {name: layer for name, layer in layers.items() if name.rpartition(".")[2] in rewritten}
    parameters = [base_parameter_name(name) for name, _ in base.named_parameters() if ".lora_" not in name]
    if moved:
        names = {base_parameter_name(f"{name}.").removesuffix(".") for name, _ in base.named_modules()}
        others = [name for name in layers if name not in moved]
        config.target_modules = shortest_names(others, {name for name in names if "lora_" not in name})
        config.layers_to_transform = None
        for name, layer in moved.items():
            parameter = re.escape(f"{name}.weight")  # recorded if its rank or alpha differs
            if layer.r[ADAPTER_NAME] != config.r:
                config.rank_pattern = {parameter: layer.r[ADAPTER_NAME], **config.rank_pattern}
            if layer.lora_alpha[ADAPTER_NAME] != config.lora_alpha:
                config.alpha_pattern = {parameter: layer.lora_alpha[ADAPTER_NAME], **config.alpha_pattern}
    targets = {*(config.target_parameters or ()), *(f"{name}.weight" for name in moved)}
    if targets:
        suffixes = tuple(f".{name}" for name in targets)
        targeted = [name for name in parameters if name in targets or name.endswith(suffixes)]
        config.target_parameters = shortest_names(targeted, parameters)
        config.lora_dropout = 0.0
    return config
