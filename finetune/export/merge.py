"""Merges adapters into the base weights: in float64, one layer at a time, on the CPU.

`W + BA * scale` (and what DoRA, AdaLoRA, IA3 and OFT compute instead) is computed by peft's own layers on float64
values and rounded once, to the type that is written. The only copy of the model that is made is the one returned.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from finetune.errors import ModelError, TrainingError
from finetune.export.weights import ADAPTER_NAME, build_meta_model, unwrap_adapter

MERGEABLE = frozenset({"LORA", "ADALORA", "IA3", "OFT", "TRAINABLE_TOKENS", "LOHA", "LOKR"})
"""The kinds of adapters, in peft's words, that are folded into weights exactly."""

_BASE_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Merged:
    """The weights of the plain model by their names in it."""

    weights: Mapping[str, Tensor]
    has_untied_weights: bool  # what was one weight at two places has become two: an adapter was at one of the places


def require_mergeable(model: PeftModel) -> None:
    """Raise ModelError with the reason where the model's adapter cannot become a part of its weights."""
    kind = str(model.peft_config[ADAPTER_NAME].peft_type.value)
    if model.peft_config[ADAPTER_NAME].is_prompt_learning:
        raise ModelError(
            f"export.merge: {kind.lower().replace('_', ' ')} learns tokens or keys before the text and alters no "
            "weight, so there is nothing that could be folded in. Leave `merge` out and load it with peft."
        )
    if kind not in MERGEABLE:
        known = ", ".join(sorted(MERGEABLE))
        raise ModelError(f"export.merge: adapters of the kind {kind} are not merged here; those that are: {known}.")


def merge(model: PeftModel, weights: Mapping[str, Tensor], *, dtype: torch.dtype | None) -> Merged:
    """Return the base's weights with the adapter in them, each of `dtype`, or of its own type in the base where None.

    `model` tells classes and configs and is not asked for values. `weights` holds all values of adapter and base by
    canonical name, the base's under peft's names or its own; integers keep their type. Raises ModelError for an adapter
    that cannot be merged, TrainingError where a value is missing or not finite. No collective.
    """
    require_mergeable(model)
    skeleton = _build_meta_peft_model(model)
    with torch.no_grad():
        merged = dict(_merged_tensors(skeleton.base_model.model, "", _Values(skeleton, weights, dtype=dtype)))
    return Merged(merged, _has_untied_weights(build_meta_model(unwrap_adapter(model), dtype=torch.float32), merged))


def _build_meta_peft_model(model: PeftModel) -> PeftModel:
    """Return base and adapter without values; what peft works out from sizes alone is there."""
    config = copy.deepcopy(model.peft_config[ADAPTER_NAME])
    config.base_model_name_or_path = None
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # others would look at values, and there are none
    base = build_meta_model(unwrap_adapter(model), dtype=torch.float32)
    return get_peft_model(base, config, low_cpu_mem_usage=True).eval()


class _Values:
    """The values of the skeleton's parameters and buffers; tied ones are given under any one of their names."""

    def __init__(self, skeleton: PeftModel, weights: Mapping[str, Tensor], *, dtype: torch.dtype | None) -> None:
        self._weights = weights
        self._dtype = dtype
        self._names: dict[int, list[str]] = {}
        for name, place in skeleton.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(place), []).append(name)
        for name, buffer in skeleton.named_buffers(remove_duplicate=False):
            self._names.setdefault(id(buffer), []).append(name)

    def of(self, place: Tensor) -> Tensor:
        """Return the value that belongs at the place; raises TrainingError where none was given, or another shape."""
        names = self._names[id(place)]
        for name in (each for written in names for each in (written, base_parameter_name(written))):
            if name in self._weights:
                value = self._weights[name]
                if value.shape != place.shape:
                    raise TrainingError(
                        f"export: `{name}` has the shape {tuple(value.shape)} instead of {tuple(place.shape)}. "
                        "Nothing was written."
                    )
                return value
        raise TrainingError(f"export: `{names[0]}` is missing, so nothing can be merged. Nothing was written.")

    def rounded(self, value: Tensor, place: Tensor) -> Tensor:
        """Return the value in the type that is written, else in that of the base's own value at the place."""
        if not value.is_floating_point():
            return value
        return value.detach().to(self._dtype or self.of(place).dtype)

    def is_given(self, place: Tensor) -> bool:
        """Tell whether a value was given; buffers that can be worked out anew need not be."""
        return any(
            name in self._weights or base_parameter_name(name) in self._weights for name in self._names[id(place)]
        )


def base_parameter_name(name: str) -> str:
    """Return the name that a weight of the base had before peft wrapped its module.

    >>> plain_name("base_model.model.lm_head.base_layer.weight")
    'lm_head.weight'
    """
    inner = name.removeprefix(_BASE_PREFIX).replace(".token_adapter.", ".")
    return inner.replace(".base_layer.", ".").replace(".original_module.", ".")


def _merged_tensors(module: nn.Module, path: str, values: _Values) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and given buffer of the plain model with its name, the adapters' work in them."""
    if isinstance(module, ModulesToSaveWrapper):
        yield from _modules_to_save(module, path, values)
    elif isinstance(module, TrainableTokensWrapper):
        yield from _merged_layer(module.token_adapter, path, values)
    elif isinstance(module, BaseTunerLayer):
        yield from _merged_layer(module, path, values)
    else:
        for name, place in _named_tensors(module, recurse=False):
            if isinstance(place, nn.Parameter) or values.is_given(place):
                yield _joined(path, name), values.rounded(values.of(place), place)
        for name, child in module.named_children():
            yield from _merged_tensors(child, _joined(path, name), values)


def _modules_to_save(module: ModulesToSaveWrapper, path: str, values: _Values) -> Iterator[tuple[str, Tensor]]:
    """Yield what was trained in full in the place of the base's own module."""
    own = dict(_named_tensors(module.original_module, recurse=True))
    for name, place in _named_tensors(module.modules_to_save[ADAPTER_NAME], recurse=True):
        if isinstance(place, nn.Parameter) or values.is_given(place):
            yield _joined(path, name), values.rounded(values.of(place), own[name])


def _merged_layer(layer: nn.Module, path: str, values: _Values) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the base's layer, merged."""
    working = _with_values(layer, values)
    peft_layer: Any = working
    peft_layer.merge(adapter_names=[ADAPTER_NAME])
    merged = dict(_base_layer(working).named_parameters())
    for name, place in _base_layer(layer).named_parameters():
        if not bool(torch.isfinite(merged[name]).all()):
            raise TrainingError(f"export: `{_joined(path, name)}` is not finite once the adapter is merged into it.")
        yield _joined(path, name), values.rounded(merged[name], place)


def _named_tensors(module: nn.Module, *, recurse: bool) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=recurse, remove_duplicate=False)
    yield from module.named_buffers(recurse=recurse, remove_duplicate=False)


def _with_values(layer: nn.Module, values: _Values) -> nn.Module:
    """Return a copy of the layer whose parameters hold their values in 64 bits; the skeleton stays as it is."""
    working = copy.deepcopy(layer)
    for name, module in layer.named_modules():
        twin = working.get_submodule(name)
        for own, place in module._parameters.items():
            if place is not None:
                value = values.of(place).to("cpu", torch.float64, copy=True)
                twin._parameters[own] = nn.Parameter(value, requires_grad=False)
    return working


def _base_layer(layer: nn.Module) -> nn.Module:
    """Return the layer of the plain model in it."""
    peft_layer: Any = layer
    inner: nn.Module = peft_layer.get_base_layer()
    return inner


def _has_untied_weights(skeleton: PreTrainedModel, merged: Mapping[str, Tensor]) -> bool:
    """Tell whether weights that the plain model holds as one are two now."""
    groups: dict[int, list[Tensor]] = {}
    for name, place in skeleton.state_dict(keep_vars=True).items():
        if name in merged:
            groups.setdefault(id(place), []).append(merged[name])
    return any(
        other is not group[0] and not torch.equal(other, group[0]) for group in groups.values() for other in group[1:]
    )


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
