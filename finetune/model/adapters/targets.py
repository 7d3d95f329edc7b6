"""The modules and parameters that LoRA adapts: attention, shared experts, routed experts, router.

Routed experts are matrices [experts, rows, columns] of one module, which peft adapts as parameters, not as modules. For
a mixture of experts this module selects the targets by full name; for other models, peft selects them. At the end are
workarounds for what peft does with targets (peft 0.21, transformers 5.23); a test fails when one is no longer needed.
"""

import inspect
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from peft.utils import transformers_weight_conversion as conversion
from torch import nn
from transformers import PreTrainedModel

from finetune.config.sections.model import LoraSection
from finetune.errors import ModelError, Problem
from finetune.model.adapters.context import is_conv1d, module_name
from finetune.model.layers import layer_index, layer_lists, unused_modules
from finetune.model.loading.architecture import new_head_modules
from finetune.model.upstream import patched
from finetune.runtime.parameters import full_shape

ALL_LINEAR = "all-linear"
_EXPERTS = "experts"
_ROUTERS = ("gate", "router")

INITS_FROM_BASE = ("pissa", "olora")
"""Initializations that move a part of the base's weights into the adapter and thus change the base."""

_INITS_OF_MODULES = (*INITS_FROM_BASE, "loftq")


@dataclass(frozen=True)
class Experts:
    """The routed experts of one layer: one module with their matrices, or a list of modules."""

    name: str
    num_experts: int
    block: str  # the module that contains them and their router
    parameters: tuple[str, ...] = ()  # names of the matrices in the module, [experts, rows, columns]; empty for a list


@dataclass(frozen=True)
class LoraTargets:
    """The full names of the adapted modules and parameters; `left_out` lists others with the reason."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    left_out: tuple[str, ...]


def find_experts(model: nn.Module) -> list[Experts]:
    """Return the routed experts of every layer, one module or layers next to a router (JetMoE); empty if dense."""
    found = []
    for name, module in model.named_modules():
        parent, _, own_name = name.rpartition(".")
        matrices = _stacked(module)
        if own_name == _EXPERTS and isinstance(module, nn.ModuleList):
            found.append(Experts(name, len(module), parent))
        elif own_name == _EXPERTS and matrices:
            found.append(Experts(name, next(iter(matrices.values())), parent, tuple(matrices)))
        elif any(hasattr(module, router) for router in _ROUTERS):
            inner = {
                f"{child_name}.{parameter}": count
                for child_name, child in module.named_children()
                if not isinstance(child, nn.Conv1d) and child_name != _EXPERTS
                for parameter, count in _stacked(child).items()
            }
            if inner:
                found.append(Experts(name, next(iter(inner.values())), name, tuple(inner)))
    return found


def _stacked(module: nn.Module) -> dict[str, int]:
    """Return the number of experts of every stacked matrix of the module itself, by name."""
    shapes = {matrix: full_shape(parameter) for matrix, parameter in module.named_parameters(recurse=False)}
    return {matrix: shape[0] for matrix, shape in shapes.items() if len(shape) == 3}


def router_names(model: nn.Module, experts: Sequence[Experts]) -> list[str]:
    """Return the names of the routers of these experts."""
    blocks = {layer.block: model.get_submodule(layer.block) for layer in experts}
    return [
        f"{name}.{local_name}"
        for name, block in blocks.items()
        for local_name in _ROUTERS
        if hasattr(block, local_name)
    ]


def adapts_experts(lora: LoraSection) -> bool:
    """Return whether routed experts get adapters; the default is True for `target_modules: all-linear`."""
    return lora.target_modules == ALL_LINEAR if lora.experts is None else lora.experts


def target_problems(model: PreTrainedModel, lora: LoraSection) -> list[Problem]:
    """Return a problem per key that the model's experts and router do not support; reads shapes, not values."""
    experts = find_experts(model)
    problems = []
    if not experts:
        keys = (("experts", lora.experts is not None), ("router", lora.router))
        message = "this model has no routed experts. Remove the key."
        return [Problem(f"model.lora.{key}", message) for key, is_written in keys if is_written]
    routers = router_names(model, experts)
    if lora.router and not routers:
        problems.append(Problem("model.lora.router", "no module `gate` or `router` was found. Remove the key."))
    has_router_parameters = lora.router and bool(_router_targets(model, routers)[1])
    if not has_router_parameters and not (adapts_experts(lora) and any(layer.parameters for layer in experts)):
        return problems
    setting = "experts: false" if adapts_experts(lora) else "router: false"
    reason = "peft adapts the matrices of routed experts and routers as parameters, which does not support"
    if lora.dora:
        problems.append(Problem("model.lora.dora", f"{reason} DoRA. Write `{setting}`, or `dora: false`."))
    if lora.init in _INITS_OF_MODULES:
        problems.append(Problem("model.lora.init", f"{reason} `{lora.init}`. Write `{setting}`, or `init: default`."))
    return problems


def choose_targets(model: PreTrainedModel, lora: LoraSection, *, head: str) -> LoraTargets | None:
    """Return the targets; None for a model without experts and mixers, whose targets peft selects itself.

    With `lora.layers` they are those in these layers; raises ModelError for a layer without one.
    """
    experts, layers = find_experts(model), layer_lists(model)
    read = [
        f"{name}.{local_name}".removeprefix(".")
        for name, parent in model.named_modules()
        for local_name, child in parent.named_children()
        if isinstance(child, nn.Linear) and is_read_by_kernel(parent, local_name)
    ]
    if not experts and not lora.layers and not (read and lora.target_modules == ALL_LINEAR):
        return None
    routers = router_names(model, experts)
    left_out = []
    if lora.target_modules != ALL_LINEAR:
        ends = tuple(f".{name}" for name in lora.target_modules)
        modules = [name for name, _ in model.named_modules() if name in lora.target_modules or name.endswith(ends)]
    else:
        modules = linear_layers(model, head=head)
        left_out = _left_out(model, lora, modules, read)
        unadapted = {*routers, *(() if adapts_experts(lora) else (layer.name for layer in experts))}
        modules = [
            name
            for name in modules
            if name not in dict(left_out)
            and not any(name == module or name.startswith(f"{module}.") for module in unadapted)
        ]
    adapted_experts = experts if adapts_experts(lora) else []
    parameters = [f"{layer.name}.{local_name}" for layer in adapted_experts for local_name in layer.parameters]
    if lora.router:
        router_modules, router_parameters = _router_targets(model, routers)
        modules = [*modules, *(name for name in router_modules if name not in modules)]
        parameters = [*parameters, *router_parameters]
    by_reason: dict[str, set[str]] = {}
    for name, reason in left_out:
        by_reason.setdefault(reason, set()).add(".".join(_without_layers(name)[-2:]))
    if lora.layers:
        unused = tuple(f"{name}." for name in unused_modules(model))
        modules, parameters = (
            [name for name in names if layer_index(name, layers) in lora.layers and not f"{name}.".startswith(unused)]
            for names in (modules, parameters)
        )
        adapted = {layer_index(name, layers) for name in (*modules, *parameters)}
        if absent := [number for number in lora.layers if number not in adapted]:
            known = ", ".join(f"`{name}` {len(stack)}" for name, stack in layers.items())
            raise ModelError(
                f"model.lora.layers: there is no adapter on layer {', '.join(map(str, absent))}. Layers are counted "
                f"from 0 ({known or 'this model has none'}), and their modules must be in `model.lora.target_modules`."
            )
    return LoraTargets(
        modules=tuple(modules),
        parameters=tuple(parameters),
        left_out=tuple(f"{', '.join(sorted(names))} ({reason})" for reason, names in by_reason.items()),
    )


def linear_layers(model: PreTrainedModel, *, head: str) -> list[str]:
    """Return the names of the linear layers except the heads."""
    heads = (module_name(model.get_output_embeddings(), model), *new_head_modules(model, head=head))
    return [
        name
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or is_conv1d(module)) and name not in heads
    ]


def _left_out(
    model: PreTrainedModel, lora: LoraSection, modules: Sequence[str], read: Collection[str]
) -> list[tuple[str, str]]:
    """Return the linear layers that get no adapter, with the reason."""
    rewritten = rewritten_names(model.config.model_type)
    left_out = []
    for name in modules:
        is_rewritten = name.rpartition(".")[2] in rewritten  # saved as a parameter
        if name in read:
            left_out.append((name, "a kernel reads its weight"))
        elif is_rewritten and lora.dora:
            left_out.append((name, "peft loads it as a parameter, without DoRA"))
        elif is_rewritten and not model.get_submodule(name).weight.is_floating_point():
            left_out.append((name, "peft loads it as a parameter, which must not be quantized"))
        elif lora.init in INITS_FROM_BASE and min(full_shape(model.get_submodule(name).weight)) < lora.rank:
            left_out.append((name, "it is smaller than the rank"))
    return left_out


def _router_targets(model: nn.Module, routers: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the linear layers of the routers, and the weights of routers without linear layers."""
    modules, parameters = [], []
    for name in routers:
        router = model.get_submodule(name)
        linear = [local_name for local_name, module in router.named_modules() if isinstance(module, nn.Linear)]
        modules += [f"{name}.{local_name}".removesuffix(".") for local_name in linear]
        weight = router._parameters.get("weight")
        if not linear and weight is not None and len(full_shape(weight)) == 2:
            parameters.append(f"{name}.weight")
    return modules, parameters


def _without_layers(name: str) -> list[str]:
    return [part for part in name.split(".") if not part.isdigit()]


def describe_targets(model: PreTrainedModel, lora: LoraSection, targets: LoraTargets | None) -> str | None:
    """Return a line about the targets of LoRA if they were chosen here; else None.

    Must be called before adapters are added to the model.
    """
    if targets is None:
        return None
    experts = find_experts(model)
    groups: dict[str, set[str]] = {}  # by the parent within the layer
    for name in targets.modules:
        *_, group, local_name = ["model", *_without_layers(name)]
        groups.setdefault(group, set()).add(local_name)
    parts = [f"{group} ({', '.join(sorted(names))})" for group, names in groups.items()]  # `self_attn (k_proj, q_proj)`
    others = list(targets.left_out)
    routed = [layer for layer in experts if f"{layer.name}." in "".join(f"{name}." for name in targets.parameters)]
    if routed:
        without = ", without dropout" if lora.dropout else ""
        names = ", ".join(sorted({local_name for layer in routed for local_name in layer.parameters}))
        parts.append(f"{max(layer.num_experts for layer in routed)} routed experts ({names}{without})")
    elif experts and not adapts_experts(lora):
        others.append("routed experts (`model.lora.experts: true` adapts them)")
    if experts and not lora.router:
        others.append("router (`model.lora.router: true` adapts it)")
    elif lora.router:
        is_parameter = any(name.endswith(".weight") for name in targets.parameters)
        parts.append(f"router{' (without dropout)' if is_parameter and lora.dropout else ''}")
    return f"LoRA on {', '.join(parts)}" + (f"; not on {', '.join(others)}" if others else "")


def shortest_names(chosen: Collection[str], names: Collection[str]) -> list[str]:
    """Return the shortest suffixes that match only the chosen names, without layer numbers if possible.

    >>> shortest_names(["h.0.mlp.up", "h.1.mlp.up"], ["h.0.mlp.up", "h.1.mlp.up", "h.0.mlp.down", "h.0.up"])
    ['mlp.up']
    """
    by_suffix: dict[str, set[str]] = {}
    for name in chosen:
        by_suffix.setdefault(re.sub(r"^.*\.\d+\.", "", name), set()).add(name)
    shortest: set[str] = set()
    for suffix, full_names in by_suffix.items():
        matched = {name for name in names if name == suffix or name.endswith(f".{suffix}")}
        shortest |= {suffix} if matched <= set(chosen) else full_names
    return sorted(shortest)


@contextmanager
def keep_targets() -> Iterator[None]:
    """Prevent peft from changing the given targets.

    peft 0.21 rewrites the targets of some mixtures of experts as if they named modules of transformers 4: `gate_proj`
    becomes the parameter `gate_up_proj` of the routed experts at twice the rank, `all-linear` also adapts the router,
    and shared experts and dense layers with the same names lose their adapters (`_convert_peft_config_moe`). Can be
    removed when that is limited to adapters written by transformers 4.
    """
    with patched([(conversion, "convert_peft_config_for_transformers", lambda config, model, conversions: None)]):
        yield


def rewritten_names(model_type: str) -> frozenset[str]:
    """Return the names of modules that peft, on loading, replaces with parameters of the routed experts."""
    pattern = conversion._MODEL_TO_CONVERSION_PATTERN.get(model_type)
    if pattern is None or conversion.get_checkpoint_conversion_mapping(model_type) is None:
        return frozenset()
    if not conversion._MOE_FUSED_TARGETS.get(pattern):
        return frozenset()
    return frozenset(conversion._MOE_TARGET_MODULE_MAPPING.get(pattern, {}))


_REFUSED_BY_PEFT = ("mamba", "mixer")


def is_read_by_kernel(parent: nn.Module, name: str) -> bool:
    """Return whether a mixer passes the weight of its layer to a kernel instead of calling the layer.

    An adapter of that layer would not be trained. peft 0.21 refuses `out_proj` of mamba, mamba2, falcon_mamba,
    falcon_h1 and nemotron_h for this reason, but misses bamba, granitemoehybrid, jamba and zamba2, and `x_proj` and
    `dt_proj` of mamba (`_check_lora_target_modules_mamba`).
    """
    mixer_class = type(parent)
    if not any(part in mixer_class.__name__.lower() for part in _REFUSED_BY_PEFT):
        return False
    try:
        source = inspect.getsource(mixer_class)
    except (OSError, TypeError):  # code that was not read from a file
        return False
    return re.search(rf"self\.{re.escape(name)}\.weight\b(?!\.dtype)", source) is not None
