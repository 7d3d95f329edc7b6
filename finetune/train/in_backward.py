"""The update within the backward pass: each parameter learns as soon as its gradient is whole, which is then freed.

So no more than a few gradients exist at a time (LOMO: Lv et al., 2023, arXiv:2306.09782; any rule here, not SGD alone).
The numbers are those of the ordinary step. What is lost is the step's gradient norm before its first update: nothing is
clipped by it, and a gradient that is not finite is seen only where it comes to pass.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from finetune.train.groups import WAITS
from finetune.train.update import Update


class UpdateInBackward(Update):
    """Steps the optimizer one parameter at a time; each has a group of its own (`one_by_one`)."""

    unharmed = (
        "Where the loss itself is not finite, the weights have not been changed by this step. Otherwise those whose "
        "gradients came first have been (train.optimizer.in_backward): go on from the last checkpoint."
    )

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
        """`model` and `optimizer` are as Accelerate prepared them for one process."""
        super().__init__(accelerator, model, optimizer, max_gradient_norm=None)
        self._groups = self._optimizer.param_groups
        self._norms: dict[Tensor, Tensor] = {}
        self._is_bad = torch.zeros((), device=accelerator.device)  # 1 from the first number that is not finite
        for group in self._groups:
            (parameter,) = group["params"]
            parameter.register_post_accumulate_grad_hook(self._learner(group))

    def backward(self, loss: Tensor) -> None:
        """Let every parameter learn from this loss, the whole step's, unless it is not finite."""
        self._note(loss.detach())
        super().backward(loss)

    def clip(self) -> Tensor:
        """Return the norm of the gradient that has been learnt from, a scalar; nothing is clipped."""
        norms = [self._norms[each] for each in self._learning if each in self._norms]
        self._norms.clear()
        found = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros_like(self._is_bad)
        return torch.where(self._is_bad > 0, torch.full_like(self._is_bad, math.nan), found.to(torch.float32))

    def __call__(self, norm: Tensor, *, num_allowed: int) -> bool | None:
        """Tell whether the weights have been updated; None: it will be known when the norm is read."""
        if self.latch is not None:
            self.latch.flag(norm, num_allowed=num_allowed)
            return None
        return math.isfinite(norm.item())

    def settle(self) -> None:
        """Take note that every step's norm has been read."""
        super().settle()
        self._is_bad.zero_()

    def _learner(self, group: dict[str, Any]) -> Callable[[Tensor], None]:
        def learn(parameter: Tensor) -> None:
            if parameter.grad is not None and not group.get(WAITS):
                norm = torch.linalg.vector_norm(parameter.grad)
                self._norms[parameter] = norm
                self._note(norm)
                self._step(group)
            parameter.grad = None

        return learn

    def _note(self, number: Tensor) -> None:
        self._is_bad = torch.maximum(self._is_bad, (~torch.isfinite(number)).to(torch.float32))

    def _step(self, group: dict[str, Any]) -> None:
        """Step the optimizer on this group alone, unless a number was not finite before."""
        if self.latch is None and self._is_bad.item():
            return
        self._optimizer.param_groups = [group]
        if self.latch is not None:
            self._optimizer.found_inf = self._is_bad
        self._optimizer.step()
        self._optimizer.param_groups = self._groups
        if self.latch is not None:
            del self._optimizer.found_inf
