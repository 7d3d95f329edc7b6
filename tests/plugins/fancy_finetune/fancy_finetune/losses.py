"""Losses: of tokens and of preferred answers."""

from torch import Tensor
from torch.nn.functional import softplus

from finetune import register


class FocalOptions(register.Section):
    """What the loss reads of `plugin_options.focal`."""

    gamma: float = register.key("How much less certain tokens count.", 2.0, ge=0.0, le=10.0)


@register.loss("focal", options=FocalOptions, description="Lin et al., 2017, arXiv:1708.02002")
def focal(log_probabilities: Tensor, labels: Tensor, batch: object, *, options: FocalOptions) -> Tensor:
    """Return `-(1 - p)^gamma log p` of each target."""
    return -((1.0 - log_probabilities.exp()) ** options.gamma) * log_probabilities


@register.loss("capped_margin", needs_reference=True)
def capped_margin(chosen: Tensor, rejected: Tensor, section: object) -> Tensor:
    """Return `softplus(1 - min(beta m, 4))` of the difference m of both ratios, of each pair."""
    return softplus(1.0 - (section.beta * (chosen - rejected)).clamp(max=4.0))
