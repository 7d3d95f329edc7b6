"""Muon (Jordan et al., 2024) for hidden matrices and AdamW for the rest, as one optimizer.

Muon makes a matrix's momentum orthogonal before it is applied. Scaled to the root mean square of AdamW's updates (Liu
et al., 2025, arXiv:2502.16982), it learns at AdamW's rate and weight decay, so one rate serves both. torch has the rule
for matrices alone (`torch.optim.Muon`).
"""

from collections.abc import Sequence
from typing import Any

import torch

from finetune.errors import ModelError
from finetune.runtime.parameters import full_shape
from finetune.train.depth import is_embedding, layer_of
from finetune.train.groups import Named

MUON = "is_muon"
"""The key of a group that says which rule it learns by."""


class MuonAndAdamW(torch.optim.Optimizer):
    """Steps each group by the rule that it names; the state of both is here, under torch's own words."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        learning_rate: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        fused: bool,
    ) -> None:
        of_muon = [group for group in groups if group[MUON]]
        others = [group for group in groups if not group[MUON]]
        rules: list[torch.optim.Optimizer] = [
            torch.optim.Muon(of_muon, lr=learning_rate, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        ]
        if others:
            rules.append(torch.optim.AdamW(others, lr=learning_rate, betas=betas, eps=eps, fused=fused))
        super().__init__([group for rule in rules for group in rule.param_groups], {"lr": learning_rate})
        self._rules = rules

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for rule in self._rules:
            is_muon = isinstance(rule, torch.optim.Muon)
            # Both may have been replaced since: FSDP and Accelerate put others in their place.
            rule.param_groups = [group for group in self.param_groups if group[MUON] == is_muon]
            rule.state = self.state
            rule.step()


def split_for_muon(groups: Sequence[dict[str, Any]], named: Sequence[Named]) -> list[dict[str, Any]]:
    """Return the groups, each cut into hidden matrices and the rest; raises ModelError where no matrix is hidden.

    A matrix with two dimensions within a numbered layer is hidden; embeddings, heads, vectors, convolutions and experts
    stacked in one tensor are not.
    """
    hidden = {id(each.parameter) for each in named if _is_hidden_matrix(each)}
    split = [
        {**group, "params": chosen, MUON: is_muon}
        for group in groups
        for is_muon in (True, False)
        if (chosen := [each for each in group["params"] if (id(each) in hidden) == is_muon])
    ]
    if not any(group[MUON] for group in split):
        raise ModelError(
            "train.optimizer.name: muon is for matrices of numbered layers (`layers.0.`), and none of them learns. "
            "Write adamw."
        )
    return split


def _is_hidden_matrix(each: Named) -> bool:
    is_matrix = len(full_shape(each.parameter)) == 2 and layer_of(each.name) is not None
    return is_matrix and not each.is_embedding and not any(map(is_embedding, each.aliases))
