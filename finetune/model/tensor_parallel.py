"""The matrices of every layer split over the ranks of a group, by the plan that transformers has for the model.

Weights become DTensors: column-wise ones are split by output features, row-wise ones by input features, whose partial
products are summed. Embeddings, head and norms stay whole on every rank.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from finetune.errors import StrategyError
from finetune.runtime.parallel.tensor import TensorGroup

SETTING = "parallelism_config_tp_size"

TENSOR_PARALLEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Values of `model_type` whose losses are those of one process."""

_STYLES: Mapping[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_WHOLE = ("colwise_gather_output", "embedding_rowwise")
"""Styles of the head and the embedding, which stay whole."""

_PARTIAL = "replicated_with_grad_allreduce"
"""The style of a norm over each head: every rank has the gradient of its own heads.

transformers 5.24 sums `grad` in a hook after it was accumulated: of several microbatches, all but the last count
twice (`ReplicatedWithGradAllReduce`).
"""


def splitting_problem(config: Any, size: int) -> str | None:
    """Return why `size` ranks cannot share the layers of a model with this config; None if they can."""
    if config.model_type not in TENSOR_PARALLEL_TYPES:
        return (
            f"`{config.model_type}` was not compared with one process; {', '.join(sorted(TENSOR_PARALLEL_TYPES))} were"
        )
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        return "the biases of row-wise layers (`attention_bias`, `mlp_bias`) would be added by every rank"
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (number := getattr(config, name)) % size:
            return f"{name} is {number}, which {size} ranks cannot share evenly"
    return None


def split_layers(model: Any, group: TensorGroup) -> None:
    """Split the layers of a transformers model over the group, in place; every rank has the same whole weights."""
    styles: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        style = _style_of(name, module, model.tp_plan)
        if style is not None and style in _STYLES:
            styles[name] = _STYLES[style]()
            if "lora_" in name:
                module.__class__ = nn.Linear  # peft calls it; ours would read its weight (`adapters/single_pass.py`)
        elif style == _PARTIAL:
            _mark_partial(module)
        elif style is not None and style not in _WHOLE:
            raise StrategyError(f"{SETTING}: {group.size}: the plan of `{name}` is `{style}`, which is not supported.")
    parallelize_module(model, group.mesh, styles, src_data_rank=None)
    split = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    assert split and all(isinstance(parameter.placements[0], Shard) for parameter in split), "weights are split"


def _mark_partial(module: Any) -> None:
    """Mark whole weights of which every rank gets the gradient of its own features."""
    module.has_partial_gradient = True


def partial_gradient_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters whose gradient, at the end of a step, is yet to be summed over the group.

    It is a property of their modules: FSDP2 replaces parameters, and a hook of theirs would be lost.
    """
    modules = [module for module in model.modules() if getattr(module, "has_partial_gradient", False)]
    return [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]


def _style_of(name: str, module: nn.Module, plan: Mapping[str, str]) -> str | None:
    """Return the style of a module in the model's plan; None if it stays as it is.

    Of a LoRA layer on a split one, the base has its style, and the factor next to the split features is split, too.
    """
    layer, _, factor = name.partition(".lora_")
    style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", layer.removesuffix(".base_layer")))
    if factor:
        return style if (style, factor) in (("colwise", "B.default"), ("rowwise", "A.default")) else None
    return None if hasattr(module, "base_layer") else style
