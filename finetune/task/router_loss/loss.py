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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from finetune.data.batch import Batch
from finetune.errors import ModelError
from finetune.runtime import distributed
from finetune.runtime.seeds import keep_random_state
from finetune.task.protocol import Task
from finetune.task.router_loss.routers import Router, RouterOutput, expert_probabilities, read_output

ROUTER_AUX_LOSS = "router_aux_loss"
TOKENS_PER_EXPERT = "tokens_per_expert"
STEP_TOTALS = "router_totals"
"""The batch extra with the step's token count per expert and, last, the number of targets."""


def load_balancing_loss(tokens: Tensor, probability_sums: Tensor, *, top_k: int) -> Tensor:
    """Return `E * sum_e f_e P_e` for the token counts and probability sums of E experts, both [experts].

    If the probabilities are those of some of the tokens, the result is their contribution to the loss.
    """
    pool = tokens.sum() / top_k  # layers x tokens
    return len(tokens) * (tokens / pool * probability_sums).sum() / pool


def load_metrics(tokens: Sequence[Sequence[float]]) -> dict[str, float]:
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
        self._routings: list[Routing] | None = None
        self._is_token: Tensor | None = None
        model.register_forward_pre_hook(self._read_mask, with_kwargs=True)
        for layer, router in enumerate(self.routers):
            router.module.register_forward_hook(partial(self._record, router, layer))

    @property
    def num_experts(self) -> int:
        """Return the number of experts per layer."""
        return self.routers[0].num_experts

    @property
    def top_k(self) -> int:
        """Return the number of experts per token."""
        return self.routers[0].top_k

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
            tokens = torch.stack([self._tokens(model, batch) for batch in batches]).sum(dim=0)
        totals = _step_totals(tokens, num_targets=sum(batch.num_targets for batch in batches))
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
            totals = _step_totals(tokens.sum(dim=0), num_targets=batch.num_targets)
        of_step, num_targets = totals[:-1].to(torch.float32), totals[-1].to(torch.float32)
        loss = load_balancing_loss(of_step, self.recorder.probability_sums(routings), top_k=self.recorder.top_k)
        weighted = self.coefficient * num_targets * loss  # the step divides by the number of targets
        sums["loss_sum"] = sums["loss_sum"] + (weighted - weighted.detach())
        return {**sums, ROUTER_AUX_LOSS: loss.detach()}

    def step_metrics(self, sums: Mapping[str, Any], *, num_targets: int) -> Mapping[str, float]:
        """Return the task's metrics, `router_aux_loss`, `expert_load_max` and `experts_unused`."""
        others = dict(sums)
        own = load_metrics(others.pop(TOKENS_PER_EXPERT))
        if self.coefficient is not None:
            own[ROUTER_AUX_LOSS] = others.pop(ROUTER_AUX_LOSS)
        return {**self.task.step_metrics(others, num_targets=num_targets), **own}

    def _tokens(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the number of tokens that a forward pass routes to every expert, summed over layers, [experts]."""
        self.before_batch(batch)
        with self.recorder.recording() as routings:
            self.task.loss_sums(model, batch)
        return self.recorder.tokens_per_expert(routings).sum(dim=0)


def _step_totals(tokens: Tensor, *, num_targets: int) -> Tensor:
    """Return the token counts per expert and the number of targets, over all ranks, [experts + 1]. Collective."""
    own = torch.full((1,), num_targets, dtype=tokens.dtype, device=tokens.device)
    return distributed.sum_tensor(torch.cat([tokens, own]))
