"""The matrices of every layer split over the ranks of a group, by the plan that transformers has for the model.

Weights become DTensors: column-wise ones are split by output features, row-wise ones by input features, whose partial
products are summed. Embedding and head are split by tokens of the vocabulary; norms stay whole on every rank.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional

from finetune.errors import StrategyError
from finetune.runtime.parallel import SplitHead, TensorGroup, gathered, shared_input

SETTING = "parallelism_config_tp_size"

TENSOR_PARALLEL_TYPES = frozenset(
    {
        *("gemma", "gemma2", "gemma3_text", "glm4", "granite", "llama", "mistral", "mixtral", "olmo2", "olmoe"),
        *("phi3", "qwen2", "qwen3", "qwen3_moe", "seed_oss", "smollm3"),
    }
)
"""Values of `model_type` with the losses of one process."""

_BIASED_COLUMNS = ("glm4", "seed_oss")
"""Model types of whose layers `attention_bias` concerns only column-wise ones."""

_PACKED_MLP = {"mlp.gate_up_proj": "packed_colwise", "mlp.down_proj": "rowwise"}
_NORMS_OVER_HEADS = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "colwise"),
    **dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), "split_norm"),
    "self_attn.o_proj": "rowwise",
}
_PLANS: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("glm4", "phi3"), _PACKED_MLP),
    **dict.fromkeys(("olmo2", "olmoe"), _NORMS_OVER_HEADS),
}
"""By model type, the styles of a layer's modules where transformers' plan gathers their outputs."""

_VOCABULARY = ("lm_head", "embed_tokens")
"""The head and the embedding, which are split together (`_split_vocabulary`)."""

_PARTIAL = "replicated_with_grad_allreduce"
"""The style of a norm over each head: every rank has the gradient of its own heads.

transformers 5.24 sums `grad` in a hook after it was accumulated: of several microbatches, all but the last count
twice (`ReplicatedWithGradAllReduce`).
"""


class _SplitNorm(ParallelStyle):
    """A norm over features that are split: ranks sum their mean squares, and each has the weights of its features."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def split(_: str, norm: nn.Module, mesh: DeviceMesh) -> None:
            _split_parameter(norm, "weight", mesh, Shard(0))

        def wrap(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return (DTensor.from_local(inputs[0], mesh, [Shard(-1)], run_check=False),)

        return distribute_module(module, device_mesh, split, wrap, lambda _, output, __: output.to_local())


class _Columns(ParallelStyle):
    """A layer split by its outputs: every rank computes some of them, and a summand of the gradient of its inputs.

    `ColwiseParallel` of torch 2.13 sums these gradients layer by layer; here the module above does
    (`_share_inputs`), for queries, keys and values at once, and for gate and up.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        for name in dict(module.named_parameters()):
            _split_parameter(module, name, device_mesh, self._placement)

        def forward(inputs: Tensor) -> Tensor:
            bias = None if module.bias is None else module.bias.to_local()
            return functional.linear(inputs, module.weight.to_local(), bias)

        module.forward = forward
        return module  # type: ignore[no-any-return]


class _SplitExperts(ParallelStyle):
    """Routed experts whose inner features are split, and of their adapters the factors next to these."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        if type(module).__name__ == "ParamWrapper":
            raise StrategyError(f"{SETTING}: peft's own adapters of experts are not split. Write `experts: false`.")
        inner, local_modules = module, []
        while hasattr(inner, "parameter_name"):  # peft's wrapper of one matrix
            (down,), (up,) = inner.lora_A.values(), inner.lora_B.values()
            if inner.parameter_name == "down_proj":
                _split_parameter(down, "weight", device_mesh, Shard(1))
            else:
                _split_parameter(up, "weight", device_mesh, _StridedShard(0, split_factor=2))
            (up if inner.parameter_name == "down_proj" else down).has_partial_gradient = True
            local_modules += [down, up]
            inner = inner.base_layer
        _split_parameter(inner, "gate_up_proj", device_mesh, _StridedShard(1, split_factor=2))
        _split_parameter(inner, "down_proj", device_mesh, Shard(2))
        whole_forward = module.forward

        def forward(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            hidden, top_k_weights = shared_input(hidden, device_mesh), shared_input(top_k_weights, device_mesh)
            with _local_parameters([inner, *local_modules]):
                output = whole_forward(hidden, top_k_index, top_k_weights)
            return gathered(output, device_mesh, Partial())

        module.forward = forward
        return module  # type: ignore[no-any-return]


def _split_dora(layer: Any, *, mesh: DeviceMesh, placement: Placement) -> None:
    """Compute DoRA's sum (Liu et al., 2024, arXiv:2402.09353) on parts of a layer, split as its factor is placed.

    A row of `W + BA`, whose norm DoRA takes, is whole where ranks share outputs; if they share inputs, they sum its
    squares and draw the mask of all inputs. Otherwise it is what `DoraLinearLayer` of peft 0.21 computes.
    """
    base, down, up = layer.get_base_layer(), layer.lora_A["default"], layer.lora_B["default"]
    magnitude, dropout = layer.lora_magnitude_vector["default"], layer.lora_dropout["default"]
    shares_inputs = placement.is_shard(1)
    if not shares_inputs:
        _split_parameter(magnitude, "weight", mesh, placement)

    def forward(x: Tensor, *, scaling: float, base_result: Tensor | None = None, **_: Any) -> Any:
        with _local_parameters([base, magnitude, down, up]):
            weight = base.weight.to(x.dtype)
            square = (weight + scaling * (up.weight @ down.weight).to(x.dtype)).detach().square().sum(dim=1)
            norm = (gathered(square, mesh, Partial()) if shares_inputs else square).sqrt()
            hidden = functional.linear(x, down.weight)
            hidden = gathered(hidden, mesh, Partial()) if shares_inputs else hidden
            if base_result is None and shares_inputs:  # with dropout, which the base's inputs have, too
                base_result = gathered(functional.linear(x, weight), mesh, Partial())
            elif base_result is None:
                base_result = functional.linear(x, weight)
            elif base.bias is not None:
                base_result = base_result - base.bias
            ratio = magnitude.weight / norm
            return (ratio - 1) * base_result + ratio * functional.linear(hidden, up.weight) * scaling

    def drop(x: Tensor) -> Tensor:
        whole = x.new_ones(*x.shape[:-1], mesh.size(), x.shape[-1])
        return x * functional.dropout(whole, dropout.p, layer.training)[..., mesh.get_local_rank(), :]

    magnitude.forward = forward
    if shares_inputs:  # of an Identity, for a rate of 0, peft makes no call
        dropout.forward = drop


def _split_vocabulary(model: Any, mesh: DeviceMesh) -> str | None:
    """Split embedding and head by tokens, also if they are one tensor; return why they stay whole, or None."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    size, num_ranks = model.config.get_text_config().vocab_size, mesh.size()
    has_adapters = type(head) is not nn.Linear or hasattr(embedding, "base_layer")
    if has_adapters:
        return "adapters are on embedding or head"
    if size % num_ranks or {len(embedding.weight), len(head.weight)} != {size}:
        return f"{num_ranks} ranks cannot share {size:,} tokens evenly"
    is_tied = head.weight is embedding.weight
    for module in (embedding, head):
        _receive(module, mesh)
        for name in dict(module.named_parameters()):
            _split_parameter(module, name, mesh, Shard(0))
    if is_tied:
        head.weight = embedding.weight
    head.__class__, head.mesh = SplitHead, mesh
    num_rows = size // num_ranks
    first = num_rows * mesh.get_local_rank()
    if embedding.padding_idx is not None:
        embedding.padding_idx = embedding.padding_idx - first if 0 <= embedding.padding_idx - first < num_rows else None
    whole_forward = embedding.forward

    def forward(ids: Tensor) -> Tensor:
        rows = ids - first
        is_elsewhere = (rows < 0) | (rows >= num_rows)
        with _local_parameters([embedding]):
            vectors = whole_forward(rows.masked_fill(is_elsewhere, 0))
        return gathered(vectors.masked_fill(is_elsewhere[..., None], 0.0), mesh, Partial())

    embedding.forward = forward
    return None


def _receive(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replace the values of parameters that are not split by rank 0's, on the mesh's device. Collective."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(mesh.device_type)
            dist.broadcast(parameter.data, src=0)


def _split_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    whole = module.get_parameter(name)
    split = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(split, requires_grad=whole.requires_grad))


@contextmanager
def _local_parameters(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Replace the split parameters of these modules by this rank's parts."""
    whole = [dict(module._parameters) for module in modules]
    for module in modules:
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                module._parameters[name] = parameter.to_local()
    try:
        yield
    finally:
        for module, parameters in zip(modules, whole, strict=True):
            module._parameters.update(parameters)


_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": partial(_Columns, Shard(0)),
    "rowwise": RowwiseParallel,
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
    "split_norm": _SplitNorm,
    "packed_colwise": partial(_Columns, _StridedShard(0, split_factor=2)),
    "moe_tp_experts": _SplitExperts,
}

_COLUMNS = ("colwise", "packed_colwise")
"""The styles of layers that leave the sum of their inputs' gradients to the module above."""

_FACTORS: Mapping[str, tuple[str, Placement]] = {
    "colwise": ("B.default", Shard(0)),
    "packed_colwise": ("B.default", _StridedShard(0, split_factor=2)),
    "rowwise": ("A.default", Shard(1)),
}
"""The LoRA factor next to the features that are split, by the style of its layer; of gathered ones both stay whole."""

_MAGNITUDE = "magnitude_vector.default"
"""DoRA's scales of the outputs."""


def splitting_problem(config: Any, size: int) -> str | None:
    """Return why `size` ranks cannot share the layers of a model with this config; None if they can."""
    if config.model_type not in TENSOR_PARALLEL_TYPES:
        return (
            f"`{config.model_type}` was not compared with one process; {', '.join(sorted(TENSOR_PARALLEL_TYPES))} were"
        )
    names = ("attention_out_bias", "mlp_bias", *(() if config.model_type in _BIASED_COLUMNS else ("attention_bias",)))
    if biased := [name for name in names if getattr(config, name, False)]:
        return f"the biases of row-wise layers (`{biased[0]}`) would be added by every rank"
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size"):
        if (number := getattr(config, name, 0)) % size:
            return f"{name} is {number}, which {size} ranks cannot share evenly"
    if dropout := getattr(config, "attention_dropout", 0.0):
        return (
            f"attention_dropout is {dropout}, which would drop the same positions in heads of different ranks; "
            "`model.config: {attention_dropout: 0.0}` turns it off"
        )
    return None


def split_layers(model: Any, group: TensorGroup) -> str:
    """Split a transformers model over the group, in place, and return what was split. Collective.

    All ranks of the run get the weights of rank 0, whatever theirs are: only a module's are whole on them at a time.
    """
    assert group.mesh is not None, "a group of several ranks is open"
    styles = list(_styles_of(model))
    layers = {name.partition(".lora_")[0].removesuffix(".base_layer") for name, _, style in styles if style in _COLUMNS}
    for parent in sorted({layer.rpartition(".")[0] for layer in layers}):
        _share_inputs(model.get_submodule(parent), group.mesh)
    for name, module, style in styles:
        layer, _, factor = name.partition(".lora_")
        if factor and style not in _FACTORS:
            raise StrategyError(
                f"{SETTING}: inputs or outputs of `{layer}` are gathered, where DoRA is not split. Leave "
                "`model.lora.dora` out."
            )
        _receive(module, group.mesh)
        if factor == _MAGNITUDE:
            _split_dora(model.get_submodule(layer), mesh=group.mesh, placement=_FACTORS[style][1])
        elif factor:
            _split_parameter(module, "weight", group.mesh, _FACTORS[style][1])  # read by `adapters/single_pass.py`
            if style in _COLUMNS:  # of the gradient of `A`, every rank has the summand of its outputs
                model.get_submodule(f"{layer}.lora_A.default").has_partial_gradient = True
        elif style in _STYLES:
            parallelize_module(module, group.mesh, _STYLES[style](), src_data_rank=None)
        elif style == _PARTIAL:
            module.has_partial_gradient = True  # whole, but every rank gets that of its own features
        else:
            raise StrategyError(f"{SETTING}: {group.size}: the plan of `{name}` is `{style}`, which is not supported.")
    reason = _split_vocabulary(model, group.mesh)
    _receive(model, group.mesh)
    assert any(isinstance(parameter, DTensor) for parameter in model.parameters()), "weights are split"
    split = f"{group.size} ranks share the matrices of every layer"
    if reason is not None:
        return f"{split}; embedding and head are whole, since {reason}"
    return f"{split}, and embedding and head"


def _share_inputs(module: nn.Module, mesh: DeviceMesh) -> None:
    """Sum the gradient of the module's hidden states, once for all of its layers that are split by columns."""

    def share(_: nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
        if inputs:
            return (shared_input(inputs[0], mesh), *inputs[1:]), named
        return inputs, {**named, "hidden_states": shared_input(named["hidden_states"], mesh)}

    module.register_forward_pre_hook(share, with_kwargs=True)


def _styles_of(model: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield every module that does not stay as it is: name, module, style.

    Of a LoRA layer on a split one, the base has its style, and the factor next to the split features is split, too.
    """
    own_plan = _PLANS.get(model.config.model_type, {})
    for name, module in model.named_modules():
        layer, _, factor = name.partition(".lora_")
        generic = re.sub(r"\.\d+(?=\.|$)", ".*", layer.removesuffix(".base_layer"))
        style = own_plan.get(".".join(generic.split(".")[-2:]), model.tp_plan.get(generic))
        if factor:
            is_split = factor == _MAGNITUDE or (style in _FACTORS and factor == _FACTORS[style][0])
        elif hasattr(module, "parameter_name"):  # peft's wrapper of one matrix of experts
            is_split = not name.endswith(".base_layer")
        else:
            is_split = not hasattr(module, "base_layer") and not name.endswith(_VOCABULARY)
        if style is not None and is_split:
            yield name, module, style


def partial_gradient_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters whose gradient, at the end of a step, is yet to be summed over the group.

    It is a property of their modules: FSDP2 replaces parameters, and a hook of theirs would be lost.
    """
    modules = [module for module in model.modules() if getattr(module, "has_partial_gradient", False)]
    return [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
