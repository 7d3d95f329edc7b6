"""The load-balancing loss of a whole step, added to a task's loss.

Fedus, Zoph and Shazeer, "Switch Transformers" (2021, arXiv:2101.03961, equations 4 to 6), as transformers computes it
(`load_balancing_loss_func`): for E experts, with N = layers x tokens,

    aux = E * sum_e f_e P_e,    f_e = 1/N * number of tokens routed to e,    P_e = 1/N * sum of probabilities of e

so that perfect balance gives the number of experts per token. The gradient flows through P only; f is a constant.

transformers computes it over a microbatch, so its loss depends on how a batch is split. Here N covers all ranks and
microbatches of the step, without padding. With F, the token counts of the step, each microbatch contributes
`E / N^2 * sum F S` with its own sums S of probabilities: the contributions add up to the loss above, and their
gradients to its gradient.

F and N must be known before the first backward pass. With one microbatch per step, they are summed over the ranks
between its forward and backward pass. With several, each first runs without gradients and with the same random numbers:
an additional forward pass that takes a third to a half more time. It cannot be avoided, because the gradient of the
first microbatch depends on the routing of the last.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from finetune.data.batch import Batch
from finetune.errors import ModelError
from finetune.runtime import distributed
from finetune.runtime.seeds import keep_random_state
from finetune.task.protocol import Task

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


SCORE_FUNCTIONS: Mapping[ScoreFunction, Callable[[Tensor], Tensor]] = {
    "softmax": partial(torch.softmax, dim=-1),
    "sigmoid": torch.sigmoid,
}


def _recorded_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield the name and module of every router, and the index of the logits in its output."""
    classes: dict[type, int] = {}  # modules whose router logits are recorded; the default index of the logits is 1
    for module in model.modules():
        recorded = (getattr(type(module), "_can_record_outputs", None) or {}).get(RECORDED, ())
        for recorder in recorded if isinstance(recorded, list | tuple) else (recorded,):
            router_class = getattr(recorder, "target_class", recorder)
            if isinstance(router_class, type):
                classes[router_class] = getattr(recorder, "index", 1)
    for name, module in model.named_modules():
        index = next((index for router_class, index in classes.items() if isinstance(module, router_class)), None)
        if index is not None and _FROZEN_ORIGINAL not in name.split("."):
            yield name, module, index


def _probe(module: nn.Module, *, logits_index: int) -> tuple[ScoreFunction, RouterOutput]:
    """Return a router's score function and output, from a call with random weights of the same shapes."""
    class_name = type(module).__name__
    twin = _with_random_weights(module, torch.Generator().manual_seed(0))
    try:
        matrix = next(parameter for parameter in twin.parameters() if parameter.dim() > 1)  # [experts, hidden]
        hidden = torch.randn(_NUM_TOKENS, matrix.shape[1], generator=torch.Generator().manual_seed(1))
        others = list(inspect.signature(type(module).forward).parameters)[2:]
        biases = {name: torch.zeros(len(matrix)) for name in others if name.endswith("bias")}  # of its layer (LFM2)
        with torch.no_grad():
            output = read_output(twin(hidden, **biases), logits_index=logits_index)
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
        if parameter is None:
            twin._parameters[name] = None
            continue
        shape: Sequence[int] = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 empties its parameters
        is_vector = len(shape) < 2
        values = torch.ones(shape) if is_vector else torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        twin._parameters[name] = nn.Parameter(values)
    for name, buffer in module._buffers.items():
        twin._buffers[name] = None if buffer is None else torch.zeros(buffer.shape)
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else _with_random_weights(child, generator)
    return twin.eval()


ROUTER_AUX_LOSS = "router_aux_loss"
TOKENS_PER_EXPERT = "tokens_per_expert"
STEP_TOTALS = "router_totals"
"""The batch extra with the step's token count per expert and, last, the number of targets."""


def load_balancing_loss(tokens: Tensor, probability_sums: Tensor, *, top_k: int) -> Tensor:
    """Return `E * sum_e f_e P_e` for the token counts and probability sums of E experts, both [experts].

    With the probabilities of some tokens only, the result is their contribution to the loss.
    """
    pool = tokens.sum() / top_k  # layers x tokens
    return len(tokens) * (tokens / pool * probability_sums).sum() / pool


def expert_load_metrics(tokens: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return `expert_load_max` and `experts_unused` for token counts by layer and expert.

    The former is the highest load of an expert in any layer, where 1 is an equal share of the layer's tokens; the
    latter is the number of experts in all layers without tokens.
    """
    loads = [max(layer) * len(layer) / sum(layer) for layer in tokens if sum(layer)]
    unused = sum(count == 0 for layer in tokens for count in layer)
    return {"expert_load_max": max(loads, default=float("nan")), "experts_unused": float(unused)}


@dataclass(frozen=True)
class Routing:
    """The output of one router in one forward pass."""

    layer: int  # index among the layers with a router
    output: RouterOutput
    is_token: Tensor | None  # bool [tokens], false for padding; None without padding


class RoutingRecorder:
    """Records the routing of a model within `recording()`, with hooks on its routers.

    Gradient checkpointing calls the routers again in the backward pass, which is not recorded. `model` is the unwrapped
    model, whose attention mask marks padding.
    """

    def __init__(self, model: nn.Module, routers: Sequence[Router]) -> None:
        self.routers = tuple(routers)
        self.num_experts, self.top_k = self.routers[0].num_experts, self.routers[0].top_k  # the same for all
        self._routings: list[Routing] | None = None
        self._is_token: Tensor | None = None
        model.register_forward_pre_hook(self._read_mask, with_kwargs=True)
        for layer, router in enumerate(self.routers):
            router.module.register_forward_hook(partial(self._record, router, layer))

    @contextmanager
    def recording(self) -> Iterator[list[Routing]]:
        """Yield a list to which router calls in training mode are added in this context."""
        routings: list[Routing] = []
        self._routings = routings
        try:
            yield routings
        finally:
            self._routings, self._is_token = None, None

    def tokens_per_expert(self, routings: Sequence[Routing]) -> Tensor:
        """Return the number of tokens routed to every expert, int64 [layers, experts]; padding does not count."""
        device = routings[0].output.experts.device
        counts = torch.zeros(len(self.routers) * self.num_experts, dtype=torch.int64, device=device)
        for routing in routings:
            indices = routing.output.experts + routing.layer * self.num_experts  # [tokens, top_k]
            counted = torch.ones_like(indices)
            if routing.is_token is not None:
                counted = routing.is_token[:, None].expand(indices.shape).to(indices.dtype)
            counts.scatter_add_(0, indices.flatten(), counted.flatten())
        return counts.view(len(self.routers), self.num_experts)

    def probability_sums(self, routings: Sequence[Routing]) -> Tensor:
        """Return the experts' probabilities summed over tokens and layers: float32 [experts], with gradient."""
        sums = []
        for routing in routings:
            probabilities = expert_probabilities(routing.output.logits, self.routers[routing.layer].score_function)
            if routing.is_token is None:
                sums.append(probabilities.sum(dim=0))
            else:
                sums.append(routing.is_token.to(probabilities.dtype) @ probabilities)
        return torch.stack(sums).sum(dim=0)

    def _read_mask(self, _: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
        mask = named.get("attention_mask")
        self._is_token = mask.flatten().bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None

    def _record(self, router: Router, layer: int, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._routings is None or not module.training:
            return
        read = read_output(output, logits_index=router.logits_index)
        assert read is not None, "the output has the same structure as when the router was detected"
        is_token = self._is_token
        if is_token is not None and len(is_token) != len(read.logits):
            raise ModelError(
                f"train.router_aux_loss: {router.name} routes {len(read.logits)} tokens and the attention mask has "
                f"{len(is_token)}, so padding cannot be identified. Remove the key, and `report.expert_load`."
            )
        self._routings.append(Routing(layer, read, is_token))


@dataclass(frozen=True)
class RoutedTask:
    """Wraps a task for training: records the routing and, with a coefficient, adds the load-balancing loss.

    The value of the loss stays the task's own; the load-balancing loss adds only its gradient and is logged separately.
    """

    task: Task
    recorder: RoutingRecorder
    coefficient: float | None  # of the load-balancing loss; None: no such loss
    before_batch: Callable[[Batch], None]  # called before every forward pass

    def prepare_step(self, model: nn.Module, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the batches that the task prepared, with the step's totals if there are several. Collective."""
        batches = self.task.prepare_step(model, batches)
        if self.coefficient is None or len(batches) == 1:
            return batches
        with torch.no_grad(), keep_random_state():
            counts = []
            for batch in batches:
                self.before_batch(batch)
                with self.recorder.recording() as routings:
                    self.task.loss_sums(model, batch)
                counts.append(self.recorder.tokens_per_expert(routings).sum(dim=0))  # over the layers
        totals = _step_totals(torch.stack(counts).sum(dim=0), batches)
        return [replace(batch, extras={**batch.extras, STEP_TOTALS: totals}) for batch in batches]

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the task's sums, this batch's load-balancing loss and the token counts, [layers, experts].

        A batch without totals is treated as this rank's whole step; the call is then collective.
        """
        with self.recorder.recording() as routings:
            sums = dict(self.task.loss_sums(model, batch))
        tokens = self.recorder.tokens_per_expert(routings)
        sums[TOKENS_PER_EXPERT] = tokens.to(torch.float32)
        if self.coefficient is None:
            return sums
        totals = batch.extras.get(STEP_TOTALS)
        if totals is None:
            totals = _step_totals(tokens.sum(dim=0), [batch])
        of_step, num_targets = totals[:-1].to(torch.float32), totals[-1].to(torch.float32)
        loss = load_balancing_loss(of_step, self.recorder.probability_sums(routings), top_k=self.recorder.top_k)
        weighted = self.coefficient * num_targets * loss  # the step divides by the number of targets
        sums["loss_sum"] = sums["loss_sum"] + (weighted - weighted.detach())
        return {**sums, ROUTER_AUX_LOSS: loss.detach()}

    def step_metrics(self, sums: Mapping[str, Any], *, num_targets: int) -> Mapping[str, float]:
        """Return the task's metrics, `router_aux_loss`, `expert_load_max` and `experts_unused`."""
        others = dict(sums)
        own = expert_load_metrics(others.pop(TOKENS_PER_EXPERT))
        if self.coefficient is not None:
            own[ROUTER_AUX_LOSS] = others.pop(ROUTER_AUX_LOSS)
        return {**self.task.step_metrics(others, num_targets=num_targets), **own}


def _step_totals(tokens: Tensor, batches: Sequence[Batch]) -> Tensor:
    """Return the token counts per expert and the number of targets, over all ranks, [experts + 1]. Collective.

    `tokens` are the batches' tokens, which no other rank counts again.
    """
    num_targets = torch.full(
        (1,), sum(batch.num_targets for batch in batches), dtype=tokens.dtype, device=tokens.device
    )
    counted = torch.zeros_like(tokens) if any(batch.is_copy for batch in batches) else tokens
    return distributed.sum_tensor(torch.cat([counted, num_targets]))
