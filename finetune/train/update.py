"""The update: gradients clipped to their global norm, then the optimizer's rule, unless the gradient is not finite.

On a GPU nobody waits to know whether it is. A fused optimizer is told by a flag on the device to change nothing
(`found_inf`, the protocol of `torch.amp.GradScaler`), and the host reads the norms at the next log point.
"""

import math
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from finetune.train.latch import Latch
from finetune.train.optimizer import leave_out_waiting

_COPIED = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_XPU")
"""Distributed types under which every rank holds each whole gradient when it is clipped."""


def lags_on(device: torch.device) -> bool:
    """Tell whether it is worth while to read verdicts later: on a CPU there is nothing to wait for."""
    return device.type == "cuda"


def reads_freely(tensor: Tensor) -> bool:
    """Tell whether the host has the tensor's value already."""
    return tensor.device.type == "cpu"


class Update:
    """Takes the gradients of one step from backward pass to weights."""

    unharmed = "The weights have not been changed by this step."
    """What is true of a step whose gradient is not finite."""

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, optimizer: Any, *, max_gradient_norm: float | None
    ) -> None:
        """`model` and `optimizer` are as Accelerate prepared them."""
        self._accelerator = accelerator
        self._model = model
        self._limit = max_gradient_norm
        self._is_plain = accelerator.distributed_type.name in _COPIED and accelerator.scaler is None
        self._learning = [each for each in model.parameters() if each.requires_grad] if self._is_plain else []
        self._optimizer = _unwrapped(optimizer) if accelerator.scaler is None else optimizer
        lags = lags_on(accelerator.device) and _heeds_flag(self._optimizer, device=accelerator.device)
        self.latch = Latch(accelerator.device) if lags and accelerator.scaler is None else None

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this share of the step's loss to what is there."""
        if self._is_plain:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            self._accelerator.backward(loss)

    def clip(self) -> Tensor:
        """Clip to the global norm and return the norm before clipping, a scalar that is equal on every rank.

        It is of the parameters that learn by now. Collective.
        """
        leave_out_waiting(self._optimizer)
        if self._is_plain:
            return self._clip_whole().detach().float()
        limit = math.inf if self._limit is None else self._limit
        norm = self._accelerator.clip_grad_norm_(self._model.parameters(), limit)
        if not isinstance(norm, Tensor):  # DeepSpeed has clipped and stepped already, and answers with a float
            return torch.tensor(float(norm), device=self._accelerator.device)
        full = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return full.detach().float()

    def __call__(self, norm: Tensor, *, num_allowed: int) -> bool | None:
        """Update the weights where the norm is finite, and forget the gradients; tell whether that was done.

        None: it will be known when the norm is read. Until then, a norm that is not finite keeps its own update out
        and, after `num_allowed` others of which nothing is known, every later one. The norm is of the whole gradient,
        so every rank does the same. DeepSpeed leaves the step out by itself.
        """
        if self.latch is not None:
            self._optimizer.found_inf = self.latch.flag(norm, num_allowed=num_allowed)
            self._optimizer.step()
            del self._optimizer.found_inf
            self._forget()
            return None
        is_taken = math.isfinite(norm.item())
        if is_taken or self._accelerator.scaler is not None:  # it must see an overflow to lower its scale
            self._optimizer.step()
        self._forget()
        return is_taken

    @property
    def has_news(self) -> bool:
        """Tell whether this rank has come to know of a step that was left out; never waits."""
        return self.latch is not None and self.latch.has_news

    def settle(self) -> None:
        """Take note that every step's norm has been read."""
        if self.latch is not None:
            self.latch.settle()

    def _clip_whole(self) -> Tensor:
        gradients = [each.grad for each in self._learning if each.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        # Where reading it is free, gradients that would be multiplied by 1 are left alone.
        if self._limit is not None and not (reads_freely(norm) and norm.item() + _EPSILON <= self._limit):
            torch.nn.utils.clip_grads_with_norm_(self._learning, self._limit, norm)
        return norm

    def _forget(self) -> None:
        if not self._is_plain:
            self._optimizer.zero_grad()
        for parameter in self._learning:
            parameter.grad = None


_EPSILON = 1e-6
"""What torch adds to the norm by which it divides."""


def _unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's own wrapper, which without a scaler adds nothing.

    It looks for a package on the disk at every step (accelerate 1.15). DeepSpeed's wrapper, a subclass, is kept.
    """
    return optimizer.optimizer if type(optimizer) is AcceleratedOptimizer else optimizer


def _heeds_flag(optimizer: Any, *, device: torch.device) -> bool:
    """Tell whether the optimizer changes nothing, its own state included, where `found_inf` on the device is 1.

    Torch's fused SGD does not: it would take momentum that was never written for its own (torch 2.13).
    """
    heeds = getattr(optimizer, "_step_supports_amp_scaling", False) and not isinstance(optimizer, torch.optim.SGD)
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    return heeds and all(each.device.type == device.type for each in parameters)
