"""The protocol for access to the training state by tensor name, under any strategy."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from finetune.checkpoint.format.tensor_file import TensorRecord
from finetune.checkpoint.sharding.state_layout import ShardRange

_DEEPSPEED = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class LossScale:
    """Reads and writes the loss scale of fp16 and its counters as plain numbers; without one, they are empty."""

    def __init__(self, *, scaler: Any, deepspeed: Any) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._deepspeed = deepspeed if getattr(deepspeed, "dynamic", False) else None

    def read(self) -> dict[str, float]:
        """Return `scale` and the counters of GradScaler or DeepSpeed; empty if losses are not scaled."""
        if self._scaler is not None:
            return dict(self._scaler.state_dict())
        if self._deepspeed is not None:
            counters = {name: getattr(self._deepspeed, name) for name in _DEEPSPEED}
            return {"scale": counters["cur_scale"], **counters}
        return {}

    def write(self, values: Mapping[str, float]) -> None:
        """Restore these numbers; between the two scalers, only the scale itself is transferred."""
        if not values:
            return
        if self._scaler is not None:
            own = self._scaler.state_dict()
            self._scaler.load_state_dict({**own, **{name: values[name] for name in own if name in values}})
        if self._deepspeed is not None:
            for name in _DEEPSPEED:
                setattr(self._deepspeed, name, values.get(name, getattr(self._deepspeed, name)))
            self._deepspeed.cur_scale = values["scale"]


Scalars = dict[str, dict[str, float]]
"""Numbers in the optimizer's state (`step`), by parameter name and key."""


class StateAccess(Protocol):
    """Reads and writes the training state; each rank holds elements [start, stop) of every flattened tensor."""

    @property
    def device(self) -> torch.device:
        """Return the device from which tensors can be sent to other ranks."""

    def records(self) -> list[TensorRecord]:
        """Return the tensors known to this rank, with full shapes; other ranks may have more optimizer state."""

    def expected_state_keys(self) -> tuple[str, ...]:
        """Return the keys of the state that the optimizer will keep per element of a parameter; empty if unknown."""

    def is_replicated(self, record: TensorRecord) -> bool:
        """Return whether every rank holds all of the tensor."""

    def is_copy(self, record: TensorRecord) -> bool:
        """Return whether this rank's elements are copies of another rank's, which gathering does not use."""

    def local_range(self, record: TensorRecord) -> ShardRange:
        """Return this rank's elements."""

    def read(self, record: TensorRecord) -> Tensor:
        """Return this rank's elements, flat, on any device; read-only."""

    def write(self, record: TensorRecord, values: Tensor) -> None:
        """Write this rank's elements, given flat."""

    def adopt(self, record: TensorRecord, values: Tensor) -> bool:
        """Use the full tensor, given flat, as the optimizer's state without copying; return whether that was possible.

        If it was, the caller must not write to it any more.
        """

    def read_scalars(self) -> Scalars:
        """Return the numbers known to this rank."""

    def write_scalars(self, scalars: Scalars) -> None:
        """Write the optimizer's numbers; raises CheckpointError if parameters that share one need different ones."""

    def discard_state(self, names: Iterable[str]) -> None:
        """Remove the optimizer state of these parameters, which have not been updated yet."""

    def begin_reading(self) -> None:
        """Make the state readable."""

    def begin_writing(self) -> None:
        """Create optimizer state to write into; parameters may change and must all be written afterwards."""

    def finish_writing(self) -> None:
        """Copy the written values to the tensors that training reads. Collective."""

    @property
    def loss_scale(self) -> LossScale:
        """Return the loss scale of fp16."""
