"""The update: clips gradients to their global norm, then steps the optimizer unless the gradient is not finite.

On a GPU the host does not wait for the finite check. A fused optimizer reads a flag on the device that makes it skip
the update (`found_inf`, the protocol of `torch.amp.GradScaler`), and the host reads the norms at the next log point.

`UpdateInBackward` updates every parameter as soon as its gradient is complete, and then frees the gradient, so only a
few gradients exist at a time (LOMO: Lv et al., 2023, arXiv:2306.09782; here with any optimizer, not only SGD). Results
equal the ordinary step's. The gradient norm is not known before the first update of a step, so nothing is
clipped, and a non-finite gradient is detected only when it is computed.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from finetune.model.tensor_parallel import partial_gradient_parameters
from finetune.runtime.parallel import tensor_group
from finetune.runtime.parameters import NOT_YET_UNFROZEN, local_tensor
from finetune.train.optim.optimizers import drop_not_yet_unfrozen
from finetune.train.upstream import supports_found_inf, without_accelerate_wrapper


class DeferredFiniteCheck:
    """Flags every step whose gradient is not finite, and every later step once there are too many of them."""

    def __init__(self, device: torch.device) -> None:
        self._num_unread = torch.zeros((), device=device)  # skipped steps that the host has not read yet
        self._copy: Tensor | None = None  # of that number, in flight to the host
        self._arrival: torch.Event | None = None

    def flag(self, norm: Tensor, *, num_allowed: int) -> Tensor:
        """Return 1 if the step with this gradient norm must be skipped, else 0: a float32 scalar.

        `num_allowed` is the number of further skips after which every later step is skipped, too.
        """
        is_bad = (~torch.isfinite(norm)).float()
        self._num_unread += is_bad
        flag = torch.maximum(is_bad, (self._num_unread > num_allowed).float())
        if self._copy is None:  # no copy to the host is in flight
            self._copy = self._num_unread.to("cpu", non_blocking=True, copy=True)  # torch pins the destination
            self._arrival = torch.Event(device=self._num_unread.device)
            self._arrival.record()
        return flag

    @property
    def has_news(self) -> bool:
        """Return whether the host has read that a step was skipped; never waits, so ranks may differ."""
        if self._copy is None or (self._arrival is not None and not self._arrival.query()):
            return False
        is_bad, self._copy = bool(self._copy.item()), None
        return is_bad

    def reset(self) -> None:
        """Reset the count after the host has read every step."""
        self._num_unread.zero_()
        self._copy = None


_REPLICATED_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_XPU")
"""Distributed types with unsharded gradients on every rank at clipping time."""


def defers_check_on(device: torch.device) -> bool:
    """Return whether reading the check later saves a synchronization, which a CPU does not need."""
    return device.type == "cuda"


def is_on_host(tensor: Tensor) -> bool:
    """Return whether the tensor is in host memory."""
    return tensor.device.type == "cpu"


class Update:
    """Runs the backward pass, gradient clipping and optimizer step of one training step."""

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
        self._partial = partial_gradient_parameters(model) if tensor_group().size > 1 else []
        self._optimizer = without_accelerate_wrapper(optimizer) if accelerator.scaler is None else optimizer
        lags = defers_check_on(accelerator.device) and supports_found_inf(self._optimizer, device=accelerator.device)
        self.finite_check = DeferredFiniteCheck(accelerator.device) if lags and accelerator.scaler is None else None

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of this microbatch's share of the step's loss."""
        if self._has_whole_gradients:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            self._accelerator.backward(loss)

    def clip(self) -> Tensor:
        """Clip to the global norm and return the norm before clipping, a scalar that is equal on every rank.

        The norm is over the parameters that are unfrozen at this step. Collective.
        """
        drop_not_yet_unfrozen(self._optimizer)
        group = tensor_group()
        if self._partial:
            _sum_gradients(self._partial, group.process_group)
        if group.copies is not None:
            _sum_gradients(self._trained, group.copies, divisor=group.num_groups)
        if self._has_whole_gradients:
            return self._clip_whole().detach().float()
        limit = math.inf if self._limit is None else self._limit
        norm = self._accelerator.clip_grad_norm_(self._model.parameters(), limit)
        if not isinstance(norm, Tensor):  # DeepSpeed has already clipped and stepped, and returns a float
            return torch.tensor(float(norm), device=self._accelerator.device)
        full = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return full.detach().float()

    def __call__(self, norm: Tensor, *, num_allowed: int) -> bool | None:
        """Update the weights if the norm is finite, drop the gradients, and return whether the weights were updated.

        None means that the result is known once the norm is read. Until then, a non-finite norm prevents its own update
        and, after `num_allowed` unread others, every later one. The norm is that of the full gradient, so every rank
        does the same. DeepSpeed skips the step itself.
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
        """Record that the norm of every step has been read."""
        if self.finite_check is not None:
            self.finite_check.reset()

    def _clip_whole(self) -> Tensor:
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        if tensor_group().size > 1:
            return self._clip_split(gradients)
        norm = torch.nn.utils.get_total_norm(gradients)
        # If reading the norm needs no synchronization, skip the multiplication by 1.
        if self._limit is not None and not (is_on_host(norm) and norm.item() + _EPSILON <= self._limit):
            torch.nn.utils.clip_grads_with_norm_(self._trained, self._limit, norm)
        return norm

    def _clip_split(self, gradients: list[Tensor]) -> Tensor:
        """Clip gradients; some are split over the ranks that share weights. Collective."""
        split = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
        whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
        local_norm = torch.nn.utils.get_total_norm(split).to(self._accelerator.device)  # on the CPU if none is split
        square = local_norm.square()
        dist.all_reduce(square, group=tensor_group().process_group)
        norm = (square + torch.nn.utils.get_total_norm(whole).to(square).square()).sqrt()
        if self._limit is not None:
            torch._foreach_mul_([*split, *whole], (self._limit / (norm + _EPSILON)).clamp(max=1.0))
        return norm

    def _zero_gradients(self) -> None:
        if not self._has_whole_gradients:
            self._optimizer.zero_grad()
        for parameter in self._trained:
            parameter.grad = None


def _sum_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, *, divisor: int = 1) -> None:
    """Sum this rank's part of the gradients over the group, and divide; small ones in one message. Collective."""
    local = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
    small = [gradient for gradient in local if gradient.numel() < _LARGE_ELEMENTS or not gradient.is_contiguous()]
    are_small = set(map(id, small))
    for gradient in local:
        if id(gradient) not in are_small:
            dist.all_reduce(gradient, group=group)
    if small:
        total = torch.cat([gradient.flatten() for gradient in small])
        dist.all_reduce(total, group=group)
        for gradient, summed in zip(small, torch.split(total, [one.numel() for one in small]), strict=True):
            gradient.copy_(summed.view_as(gradient))
    if divisor > 1:
        torch._foreach_div_(local, divisor)


_LARGE_ELEMENTS = 1 << 20
"""Elements of a gradient that is worth a message."""

_EPSILON = 1e-6
"""The epsilon that torch adds to the norm in the divisor."""


class UpdateInBackward(Update):
    """Steps the optimizer one parameter at a time; every parameter has its own group (`one_group_per_parameter`)."""

    nonfinite_effect = (
        "If the loss itself is not finite, this step has not changed the weights. Otherwise it has changed the weights "
        "whose gradients came first (train.optimizer.in_backward): resume from the last checkpoint."
    )

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
        """`model` and `optimizer` are as Accelerate prepared them for one process."""
        super().__init__(accelerator, model, optimizer, max_gradient_norm=None)
        self._groups = self._optimizer.param_groups
        self._norms: dict[Tensor, Tensor] = {}
        self._is_bad = torch.zeros((), device=accelerator.device)  # 1 after the first non-finite value
        for group in self._groups:
            (parameter,) = group["params"]
            parameter.register_post_accumulate_grad_hook(self._gradient_hook(group))

    def backward(self, loss: Tensor) -> None:
        """Update every parameter from the loss of the whole step, unless it is not finite."""
        self._check(loss.detach())
        super().backward(loss)

    def clip(self) -> Tensor:
        """Return the norm of the gradient that was applied, a scalar; nothing is clipped."""
        norms = [self._norms[parameter] for parameter in self._trained if parameter in self._norms]
        self._norms.clear()
        total_norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros_like(self._is_bad)
        return torch.where(self._is_bad > 0, torch.full_like(self._is_bad, math.nan), total_norm.to(torch.float32))

    def __call__(self, norm: Tensor, *, num_allowed: int) -> bool | None:
        """Return whether the weights have been updated; None means that it is known once the norm is read."""
        if self.finite_check is not None:
            self.finite_check.flag(norm, num_allowed=num_allowed)
            return None
        return math.isfinite(norm.item())

    def mark_all_read(self) -> None:
        """Record that the norm of every step has been read."""
        super().mark_all_read()
        self._is_bad.zero_()

    def _gradient_hook(self, group: dict[str, Any]) -> Callable[[Tensor], None]:
        def update(parameter: Tensor) -> None:
            if parameter.grad is not None and not group.get(NOT_YET_UNFROZEN):
                norm = torch.linalg.vector_norm(parameter.grad)
                self._norms[parameter] = norm
                self._check(norm)
                if self.finite_check is not None or not self._is_bad.item():  # each group by itself
                    self._optimizer.param_groups = [group]
                    if self.finite_check is not None:
                        self._optimizer.found_inf = self._is_bad
                    self._optimizer.step()
                    self._optimizer.param_groups = self._groups
                    if self.finite_check is not None:
                        del self._optimizer.found_inf
            parameter.grad = None

        return update

    def _check(self, number: Tensor) -> None:
        self._is_bad = torch.maximum(self._is_bad, (~torch.isfinite(number)).to(torch.float32))
