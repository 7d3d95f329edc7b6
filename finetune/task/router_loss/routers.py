"""The routers of a mixture of experts, found where transformers records `router_logits`.

A router maps hidden states [tokens, hidden] to a tuple with the logits of all experts, the weights of the chosen ones
and their indices. Whether the weights are a softmax or a sigmoid of the logits differs from model to model and is not
in any config: each kind of router is called once, by itself, to see which.
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
"""The name under which transformers records what routers return (`_can_record_outputs`)."""

_FROZEN_ORIGINAL = "original_module"
"""Where peft keeps a module of which it trains a copy (`modules_to_save`); only the copy is called."""

_NUM_TOKENS = 32  # of the call that shows the score function
_TOLERANCE = 1e-3  # relative, of the weights of one token


@dataclass(frozen=True)
class Router:
    """A router of a model."""

    name: str
    module: nn.Module
    logits_index: int  # of the logits in what it returns
    num_experts: int
    top_k: int  # experts for each token
    score_function: ScoreFunction


@dataclass(frozen=True)
class RouterOutput:
    """What a router returns for some tokens."""

    logits: Tensor  # [tokens, experts]
    experts: Tensor  # [tokens, top k], int64
    weights: Tensor  # [tokens, top k]


def find_routers(model: nn.Module) -> tuple[Router, ...]:
    """Return the routers in the order of the layers; none for a model without a mixture of experts.

    Its weights may be sharded, or on the meta device. Raises ModelError for a router whose score function is neither a
    softmax nor a sigmoid, and for routers over unequal numbers of experts.
    """
    score_functions: dict[type, tuple[ScoreFunction, RouterOutput]] = {}
    found = []
    for name, module, index in _recorded_modules(model):
        if type(module) not in score_functions:
            score_functions[type(module)] = _probe(module, logits_index=index)
        score_function, output = score_functions[type(module)]
        num_experts, top_k = output.logits.shape[-1], output.experts.shape[-1]
        found.append(Router(name, module, index, num_experts, top_k, score_function))
    sizes = {(router.num_experts, router.top_k) for router in found}
    if len(sizes) > 1:
        raise ModelError(f"its routers choose among {' and '.join(str(size) for size, _ in sorted(sizes))} experts")
    return tuple(found)


def read_output(output: Any, *, logits_index: int) -> RouterOutput | None:
    """Return the parts of what a router has returned; None where it does not say which experts it has chosen."""
    if not isinstance(output, tuple) or len(output) <= logits_index:
        return None
    logits, others = output[logits_index], [each for place, each in enumerate(output) if place != logits_index]
    tensors = [each for each in others if isinstance(each, Tensor)]
    experts = [each for each in tensors if not each.is_floating_point() and each.dim() == logits.dim()]
    weights = [each for each in tensors if each.is_floating_point() and experts and each.shape == experts[0].shape]
    if len(experts) != 1 or len(weights) != 1:
        return None
    return RouterOutput(logits.flatten(0, -2), experts[0].flatten(0, -2), weights[0].flatten(0, -2))


def expert_probabilities(logits: Tensor, score_function: ScoreFunction) -> Tensor:
    """Return the probabilities of all experts, [tokens, experts], in float32.

    The scores of a sigmoid are divided by their sum (DeepSeek-V3, 2024, arXiv:2412.19437, equation 19). A correction
    bias only chooses the experts and is no part of them.
    """
    scores = SCORE_FUNCTIONS[score_function](logits.float())
    return scores if score_function == "softmax" else scores / scores.sum(dim=-1, keepdim=True)


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(dim=-1)


SCORE_FUNCTIONS: Mapping[ScoreFunction, Callable[[Tensor], Tensor]] = {"softmax": _softmax, "sigmoid": torch.sigmoid}


def _recorded_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield name and module of every router, and which of its outputs are the logits."""
    kinds = dict(_recorders(model))
    for name, module in model.named_modules():
        index = next((index for kind, index in kinds.items() if isinstance(module, kind)), None)
        if index is not None and _FROZEN_ORIGINAL not in name.split("."):
            yield name, module, index


def _recorders(model: nn.Module) -> Iterator[tuple[type, int]]:
    """Yield the classes that models in this one record router logits of; a bare class has them in second place."""
    for module in model.modules():
        recorded = (getattr(type(module), "_can_record_outputs", None) or {}).get(RECORDED, ())
        for each in recorded if isinstance(recorded, list | tuple) else (recorded,):
            kind, index = getattr(each, "target_class", each), getattr(each, "index", 1)
            if isinstance(kind, type):
                yield kind, index


def _probe(module: nn.Module, *, logits_index: int) -> tuple[ScoreFunction, RouterOutput]:
    """Return the score function of a router and what it returns, from a call with random weights of its shapes."""
    kind = type(module).__name__
    twin = _with_random_weights(module, torch.Generator().manual_seed(0))
    try:
        output = read_output(_call(twin, _matrix(twin)), logits_index=logits_index)
    except Exception as error:
        raise ModelError(f"its router {kind} cannot be called by itself ({type(error).__name__}: {error})") from error
    if output is None:
        raise ModelError(f"its router {kind} does not return logits, weights and indices of experts")
    for name, function in SCORE_FUNCTIONS.items():
        if _are_proportional(output.weights, function(output.logits.float()).gather(1, output.experts)):
            return name, output
    raise ModelError(f"the scores of its router {kind} are neither a softmax nor a sigmoid of the logits")


def _with_random_weights(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """Return a copy on the CPU, without hooks, in which matrices are random, vectors are 1 and buffers are 0."""
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
    shape: Sequence[int] = getattr(parameter, "ds_shape", parameter.shape)  # a parameter of ZeRO-3 has none of its own
    return torch.ones(shape) if len(shape) < 2 else torch.randn(shape, generator=generator) / shape[-1] ** 0.5


def _matrix(module: nn.Module) -> Tensor:
    """Return the matrix that makes the logits, [experts, hidden]."""
    return next(each for each in module.parameters() if each.dim() > 1)


@torch.no_grad()
def _call(router: Any, matrix: Tensor) -> Any:
    """Return what it says about random tokens; a bias that its layer would hand it is 0 (LFM2)."""
    num_experts, width = matrix.shape
    hidden = torch.randn(_NUM_TOKENS, width, generator=torch.Generator().manual_seed(1))
    others = list(inspect.signature(type(router).forward).parameters)[2:]
    return router(hidden, **{name: torch.zeros(num_experts) for name in others if name.endswith("bias")})


def _are_proportional(weights: Tensor, scores: Tensor) -> bool:
    """Return whether the weights of each token are its scores up to a factor of its own."""
    one, other = (each.float() / each.float().sum(dim=-1, keepdim=True) for each in (weights, scores))
    return bool(torch.isclose(one, other, rtol=_TOLERANCE, atol=1e-6).all())
