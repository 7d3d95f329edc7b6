"""The update: gradients clipped to their global norm, then the optimizer's step, unless the gradient is not finite.

On a GPU the host does not wait to know whether it is. A fused optimizer reads a flag on the device that makes it change
nothing (`found_inf`, the protocol of `torch.amp.GradScaler`), and the host reads the norms at the next log point.

`UpdateInBackward` updates each parameter as soon as its gradient is whole, and then frees the gradient: no more than
a few gradients exist at a time (LOMO: Lv et al., 2023, arXiv:2306.09782; any rule here, not SGD alone). The numbers
are those of the ordinary step. What is lost is the gradient norm before the first update of a step: nothing is
clipped by it, and a gradient that is not finite is detected only when it is computed.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from finetune.runtime.parameters import NOT_YET_UNFROZEN
from finetune.train.optim.optimizers import drop_not_yet_unfrozen
from finetune.train.upstream import supports_found_inf, without_accelerate_wrapper


class DeferredFiniteCheck:
    """Flags every step whose gradient is not finite, and all steps after more of them than allowed."""

    def __init__(self, device: torch.device) -> None:
        self._num_unread = torch.zeros((), device=device)  # skipped steps of which the host does not know yet
        self._is_on_cpu = device.type == "cpu"
        self._copy: Tensor | None = None  # of that number, in flight to the host
        self._arrival: torch.Event | None = None

    def flag(self, norm: Tensor, *, num_allowed: int) -> Tensor:
        """Return 1 where the step of this gradient norm is to change nothing, else 0: a float32 scalar.

        `num_allowed` is how many more steps may be left out before no later one is taken either.
        """
        is_bad = (~torch.isfinite(norm)).float()
        self._num_unread += is_bad
        flag = torch.maximum(is_bad, (self._num_unread > num_allowed).float())
        self._send()
        return flag

    @property
    def has_news(self) -> bool:
        """Return whether the host has read that a step was skipped; never waits, so ranks may differ."""
        if self._copy is None or (self._arrival is not None and not self._arrival.query()):
            return False
        is_bad, self._copy = bool(self._copy.item()), None
        return is_bad

    def reset(self) -> None:
        """Reset the count: the host has read every step by now."""
        self._num_unread.zero_()
        self._copy = None

    def _send(self) -> None:
        """Start a copy to the host, unless one is in flight."""
        if self._copy is not None:
            return
        if self._is_on_cpu:
            self._copy = self._num_unread.clone()
            return
        self._copy = self._num_unread.to("cpu", non_blocking=True)  # torch pins what it copies to
        self._arrival = torch.Event(device=self._num_unread.device)
        self._arrival.record()


_REPLICATED_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_XPU")
"""Distributed types under which every rank holds whole gradients when they are clipped."""


def defers_check_on(device: torch.device) -> bool:
    """Return whether reading the check later saves a synchronisation: on a CPU there is none."""
    return device.type == "cuda"


def is_on_host(tensor: Tensor) -> bool:
    """Return whether the host has the tensor's value already."""
    return tensor.device.type == "cpu"


class Update:
    """Takes the gradients of one step from backward pass to weights."""

    nonfinite_effect = "This step has not changed the weights."
    """The effect of a step whose gradient is not finite, for the message."""

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, optimizer: Any, *, max_gradient_norm: float | None
    ) -> None:
        """`model` and `optimizer` are as Accelerate prepared them."""
        self._accelerator = accelerator
        self._model = model
        self._limit = max_gradient_norm
        self._has_whole_gradients = (
            accelerator.distributed_type.name in _REPLICATED_TYPES and accelerator.scaler is None
        )
        self._trained = (
            [parameter for parameter in model.parameters() if parameter.requires_grad]
            if self._has_whole_gradients
            else []
        )
        self._optimizer = without_accelerate_wrapper(optimizer) if accelerator.scaler is None else optimizer
        lags = defers_check_on(accelerator.device) and supports_found_inf(self._optimizer, device=accelerator.device)
        self.finite_check = DeferredFiniteCheck(accelerator.device) if lags and accelerator.scaler is None else None

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this share of the step's loss to what is there."""
        if self._has_whole_gradients:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            self._accelerator.backward(loss)

    def clip(self) -> Tensor:
        """Clip to the global norm and return the norm before clipping, a scalar that is equal on every rank.

        It is the norm over the parameters that are unfrozen by now. Collective.
        """
        drop_not_yet_unfrozen(self._optimizer)
        if self._has_whole_gradients:
            return self._clip_whole().detach().float()
        limit = math.inf if self._limit is None else self._limit
        norm = self._accelerator.clip_grad_norm_(self._model.parameters(), limit)
        if not isinstance(norm, Tensor):  # DeepSpeed has clipped and stepped already, and answers with a float
            return torch.tensor(float(norm), device=self._accelerator.device)
        full = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return full.detach().float()

    def __call__(self, norm: Tensor, *, num_allowed: int) -> bool | None:
        """Update the weights where the norm is finite, drop the gradients, and tell whether the weights were updated.

        None: this is known when the norm is read. Until then, a norm that is not finite prevents its own update
        and, after `num_allowed` unread others, every later one. The norm is of the whole gradient,
        so every rank does the same. DeepSpeed leaves the step out by itself.
        """
        if self.finite_check is not None:
            self._optimizer.found_inf = self.finite_check.flag(norm, num_allowed=num_allowed)
            self._optimizer.step()
            del self._optimizer.found_inf
            self._zero_gradients()
            return None
        is_taken = math.isfinite(norm.item())
        if is_taken or self._accelerator.scaler is not None:  # it must see an overflow to lower its scale
            self._optimizer.step()
        self._zero_gradients()
        return is_taken

    @property
    def has_news(self) -> bool:
        """Return whether this rank has read a skipped step; never waits."""
        return self.finite_check is not None and self.finite_check.has_news

    def mark_all_read(self) -> None:
        """Note that the norm of every step has been read."""
        if self.finite_check is not None:
            self.finite_check.reset()

    def _clip_whole(self) -> Tensor:
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        # Where reading it is free, gradients that would be multiplied by 1 are left alone.
        if self._limit is not None and not (is_on_host(norm) and norm.item() + _EPSILON <= self._limit):
            torch.nn.utils.clip_grads_with_norm_(self._trained, self._limit, norm)
        return norm

    def _zero_gradients(self) -> None:
        if not self._has_whole_gradients:
            self._optimizer.zero_grad()
        for parameter in self._trained:
            parameter.grad = None


_EPSILON = 1e-6
"""What torch adds to the norm by which it divides."""


class UpdateInBackward(Update):
    """Steps the optimizer one parameter at a time; each has a group of its own (`one_group_per_parameter`)."""

    nonfinite_effect = (
        "If the loss itself is not finite, this step has not changed the weights. Otherwise it has changed those whose "
        "gradients came first (train.optimizer.in_backward): resume from the last checkpoint."
    )

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
        """`model` and `optimizer` are as Accelerate prepared them for one process."""
        super().__init__(accelerator, model, optimizer, max_gradient_norm=None)
        self._groups = self._optimizer.param_groups
        self._norms: dict[Tensor, Tensor] = {}
        self._is_bad = torch.zeros((), device=accelerator.device)  # 1 from the first number that is not finite
        for group in self._groups:
            (parameter,) = group["params"]
            parameter.register_post_accumulate_grad_hook(self._gradient_hook(group))

    def backward(self, loss: Tensor) -> None:
        """Update every parameter from this loss, which is that of the whole step, unless it is not finite."""
        self._note(loss.detach())
        super().backward(loss)

    def clip(self) -> Tensor:
        """Return the norm of the gradient that was applied, a scalar; nothing is clipped."""
        norms = [self._norms[parameter] for parameter in self._trained if parameter in self._norms]
        self._norms.clear()
        total_norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros_like(self._is_bad)
        return torch.where(self._is_bad > 0, torch.full_like(self._is_bad, math.nan), total_norm.to(torch.float32))

    def __call__(self, norm: Tensor, *, num_allowed: int) -> bool | None:
        """Return whether the weights have been updated; None: it will be known when the norm is read."""
        if self.finite_check is not None:
            self.finite_check.flag(norm, num_allowed=num_allowed)
            return None
        return math.isfinite(norm.item())

    def mark_all_read(self) -> None:
        """Note that the norm of every step has been read."""
        super().mark_all_read()
        self._is_bad.zero_()

    def _gradient_hook(self, group: dict[str, Any]) -> Callable[[Tensor], None]:
        def update(parameter: Tensor) -> None:
            if parameter.grad is not None and not group.get(NOT_YET_UNFROZEN):
                norm = torch.linalg.vector_norm(parameter.grad)
                self._norms[parameter] = norm
                self._note(norm)
                self._step(group)
            parameter.grad = None

        return update

    def _note(self, number: Tensor) -> None:
        self._is_bad = torch.maximum(self._is_bad, (~torch.isfinite(number)).to(torch.float32))

    def _step(self, group: dict[str, Any]) -> None:
        """Step the optimizer on this group alone, unless a number was not finite before."""
        if self.finite_check is None and self._is_bad.item():
            return
        self._optimizer.param_groups = [group]
        if self.finite_check is not None:
            self._optimizer.found_inf = self._is_bad
        self._optimizer.step()
        self._optimizer.param_groups = self._groups
        if self.finite_check is not None:
            del self._optimizer.found_inf
