"""Records what the routers return in the forward passes of a loss, and sums it up."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from finetune.errors import ModelError
from finetune.task.router_loss.routers import Router, RouterOutput, expert_probabilities, read_output


@dataclass(frozen=True)
class Routing:
    """What one router has returned in one forward pass."""

    layer: int  # counts the layers that have a router
    output: RouterOutput
    is_token: Tensor | None  # bool [tokens], false for padding; None: there is none


class RoutingRecorder:
    """Records the routing of a model while it is asked to, by hooks on its routers.

    Gradient checkpointing calls the routers a second time, in the backward pass: nothing is recorded then. The model is
    the one inside all wrappers, whose attention mask says which tokens are padding.
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
        """Return the number of experts of a layer."""
        return self.routers[0].num_experts

    @property
    def top_k(self) -> int:
        """Return the number of experts to which a token is sent."""
        return self.routers[0].top_k

    @contextmanager
    def recording(self) -> Iterator[list[Routing]]:
        """Yield the list to which every call of a router in training mode is added within the context."""
        routings: list[Routing] = []
        self._routings = routings
        try:
            yield routings
        finally:
            self._routings, self._is_token = None, None

    def tokens_per_expert(self, routings: Sequence[Routing]) -> Tensor:
        """Return how many tokens each expert was sent, int64 [layers, experts]; padding does not count."""
        device = routings[0].output.experts.device
        counts = torch.zeros(len(self.routers) * self.num_experts, dtype=torch.int64, device=device)
        for routing in routings:
            places = routing.output.experts + routing.layer * self.num_experts
            counted = torch.ones_like(places) if routing.is_token is None else _by_choice(routing.is_token, places)
            counts.scatter_add_(0, places.flatten(), counted.flatten())
        return counts.view(len(self.routers), self.num_experts)

    def probability_sums(self, routings: Sequence[Routing]) -> Tensor:
        """Return the probabilities of each expert, summed over tokens and layers: float32 [experts], with gradient."""
        return torch.stack([self._probability_sum(routing) for routing in routings]).sum(dim=0)

    def _probability_sum(self, routing: Routing) -> Tensor:
        probabilities = expert_probabilities(routing.output.logits, self.routers[routing.layer].score_function)
        if routing.is_token is None:
            return probabilities.sum(dim=0)
        return routing.is_token.to(probabilities.dtype) @ probabilities

    def _read_mask(self, _: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
        mask = named.get("attention_mask")
        self._is_token = mask.flatten().bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None

    def _record(self, router: Router, layer: int, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._routings is None or not module.training:
            return
        read = read_output(output, logits_index=router.logits_index)
        assert read is not None, "a router returns what it did when it was found"
        is_token = self._is_token
        if is_token is not None and len(is_token) != len(read.logits):
            raise ModelError(
                f"train.router_aux_loss: {router.name} routes {len(read.logits)} tokens and the attention mask has "
                f"{len(is_token)}: which of them are padding is not known. Remove the key, and `report.expert_load`."
            )
        self._routings.append(Routing(layer, read, is_token))


def _by_choice(is_token: Tensor, experts: Tensor) -> Tensor:
    """Return the mask for each choice of each token, like `experts`."""
    return is_token[:, None].expand(experts.shape).to(experts.dtype)
