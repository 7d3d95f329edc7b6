"""The routers of a mixture of experts, located through the modules whose `router_logits` transformers records.

A router maps hidden states [tokens, hidden] to a tuple of the logits of all experts and the weights and indices of the
selected ones. Whether the weights are a softmax or a sigmoid of the logits depends on the model and is in no config, so
every router class is called once, standalone, to detect it.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from finetune.errors import ModelError

ScoreFunction = Literal["softmax", "sigmoid"]

RECORDED = "router_logits"
"""The name under which transformers records router outputs (`_can_record_outputs`)."""

_FROZEN_ORIGINAL = "original_module"
"""The attribute in which peft keeps the original of a trained copy (`modules_to_save`); only the copy is called."""

_NUM_TOKENS = 32  # in the call that detects the score function
_TOLERANCE = 1e-3  # relative, for the weights of one token


@dataclass(frozen=True)
class Router:
    """A router of a model."""

    name: str
    module: nn.Module
    logits_index: int  # index of the logits in its output tuple
    num_experts: int
    top_k: int  # experts per token
    score_function: ScoreFunction


@dataclass(frozen=True)
class RouterOutput:
    """A router's output for some tokens."""

    logits: Tensor  # [tokens, experts]
    experts: Tensor  # [tokens, top k], int64
    weights: Tensor  # [tokens, top k]


def find_routers(model: nn.Module) -> tuple[Router, ...]:
    """Return the routers in layer order; an empty tuple for a model without a mixture of experts.

    The weights may be sharded or on the meta device. Raises ModelError if a router's score function is neither softmax
    nor sigmoid, or if routers have different numbers of experts.
    """
    score_functions: dict[type, tuple[ScoreFunction, RouterOutput]] = {}
    routers = []
    for name, module, index in _recorded_modules(model):
        if type(module) not in score_functions:
            score_functions[type(module)] = _probe(module, logits_index=index)
        score_function, output = score_functions[type(module)]
        num_experts, top_k = output.logits.shape[-1], output.experts.shape[-1]
        routers.append(Router(name, module, index, num_experts, top_k, score_function))
    sizes = {(router.num_experts, router.top_k) for router in routers}
    if len(sizes) > 1:
        raise ModelError(f"its routers select among {' and '.join(str(size) for size, _ in sorted(sizes))} experts")
    return tuple(routers)


def read_output(output: Any, *, logits_index: int) -> RouterOutput | None:
    """Return the parts of a router's output; None if it does not contain the indices of the selected experts."""
    if not isinstance(output, tuple) or len(output) <= logits_index:
        return None
    logits = output[logits_index]
    tensors = [value for index, value in enumerate(output) if index != logits_index and isinstance(value, Tensor)]
    experts = [tensor for tensor in tensors if not tensor.is_floating_point() and tensor.dim() == logits.dim()]
    weights = [
        tensor for tensor in tensors if tensor.is_floating_point() and experts and tensor.shape == experts[0].shape
    ]
    if len(experts) != 1 or len(weights) != 1:
        return None
    return RouterOutput(logits.flatten(0, -2), experts[0].flatten(0, -2), weights[0].flatten(0, -2))


def expert_probabilities(logits: Tensor, score_function: ScoreFunction) -> Tensor:
    """Return the probabilities of all experts, [tokens, experts], in float32.

    Sigmoid scores are divided by their sum (DeepSeek-V3, 2024, arXiv:2412.19437, equation 19). A correction bias only
    affects the selection of experts and is not part of the probabilities.
    """
    scores = SCORE_FUNCTIONS[score_function](logits.float())
    return scores if score_function == "softmax" else scores / scores.sum(dim=-1, keepdim=True)


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(dim=-1)


SCORE_FUNCTIONS: Mapping[ScoreFunction, Callable[[Tensor], Tensor]] = {"softmax": _softmax, "sigmoid": torch.sigmoid}


def _recorded_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield the name and module of every router, and the index of the logits in its output."""
    classes = dict(_recorders(model))
    for name, module in model.named_modules():
        index = next((index for router_class, index in classes.items() if isinstance(module, router_class)), None)
        if index is not None and _FROZEN_ORIGINAL not in name.split("."):
            yield name, module, index


def _recorders(model: nn.Module) -> Iterator[tuple[type, int]]:
    """Yield the classes whose router logits the model's modules record; the default index of the logits is 1."""
    for module in model.modules():
        recorded = (getattr(type(module), "_can_record_outputs", None) or {}).get(RECORDED, ())
        for recorder in recorded if isinstance(recorded, list | tuple) else (recorded,):
            router_class, index = getattr(recorder, "target_class", recorder), getattr(recorder, "index", 1)
            if isinstance(router_class, type):
                yield router_class, index


def _probe(module: nn.Module, *, logits_index: int) -> tuple[ScoreFunction, RouterOutput]:
    """Return a router's score function and output, from a call with random weights of the same shapes."""
    class_name = type(module).__name__
    twin = _with_random_weights(module, torch.Generator().manual_seed(0))
    try:
        output = read_output(_call(twin, _matrix(twin)), logits_index=logits_index)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(f"its router {class_name} cannot be called standalone ({reason})") from error
    if output is None:
        raise ModelError(f"its router {class_name} does not return logits, weights and indices of experts")
    for name, function in SCORE_FUNCTIONS.items():
        scores = function(output.logits.float()).gather(1, output.experts)
        one, other = (values.float() / values.float().sum(dim=-1, keepdim=True) for values in (output.weights, scores))
        if bool(torch.isclose(one, other, rtol=_TOLERANCE, atol=1e-6).all()):
            return name, output
    raise ModelError(f"the scores of its router {class_name} are neither a softmax nor a sigmoid of the logits")


def _with_random_weights(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """Return a copy on the CPU without hooks, with random matrices, vectors of ones and buffers of zeros."""
    twin: nn.Module = object.__new__(type(module))
    nn.Module.__init__(twin)
    fresh = twin.__dict__
    twin.__dict__ = {**module.__dict__, **{name: value for name, value in fresh.items() if name.startswith("_")}}
    for name, parameter in module._parameters.items():
        twin._parameters[name] = None if parameter is None else nn.Parameter(_random_values(parameter, generator))
    for name, buffer in module._buffers.items():
        twin._buffers[name] = None if buffer is None else torch.zeros(buffer.shape)
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else _with_random_weights(child, generator)
    return twin.eval()


def _random_values(parameter: Any, generator: torch.Generator) -> Tensor:
    shape: Sequence[int] = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 empties its parameters
    return torch.ones(shape) if len(shape) < 2 else torch.randn(shape, generator=generator) / shape[-1] ** 0.5


def _matrix(module: nn.Module) -> Tensor:
    """Return the weight that produces the logits, [experts, hidden]."""
    return next(parameter for parameter in module.parameters() if parameter.dim() > 1)


@torch.no_grad()
def _call(router: Any, matrix: Tensor) -> Any:
    """Return the router's output for random tokens; a bias that its layer would pass is 0 (LFM2)."""
    num_experts, width = matrix.shape
    hidden = torch.randn(_NUM_TOKENS, width, generator=torch.Generator().manual_seed(1))
    others = list(inspect.signature(type(router).forward).parameters)[2:]
    return router(hidden, **{name: torch.zeros(num_experts) for name in others if name.endswith("bias")})
