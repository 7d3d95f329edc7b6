"""The protocol by which saving and loading access the training state: tensor by tensor, by name, under any strategy."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from finetune.checkpoint.format.tensor_file import TensorRecord

_DEEPSPEED = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class LossScale:
    """Reads and writes the loss scale and its counters as plain numbers; without one, it is empty and stays so."""

    def __init__(self, *, scaler: Any, deepspeed: Any) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._deepspeed = deepspeed if getattr(deepspeed, "dynamic", False) else None

    def read(self) -> dict[str, float]:
        """Return `scale` and the counters of whoever keeps it; empty where losses are not scaled."""
        if self._scaler is not None:
            return dict(self._scaler.state_dict())
        if self._deepspeed is not None:
            counters = {name: getattr(self._deepspeed, name) for name in _DEEPSPEED}
            return {"scale": counters["cur_scale"], **counters}
        return {}

    def write(self, values: Mapping[str, float]) -> None:
        """Continue from these numbers; the scale alone passes from one kind of scaler to the other."""
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
"""Plain numbers of the optimizer (`step`) by parameter name and their own name."""


class StateAccess(Protocol):
    """Reads and writes what training changes. A rank holds elements [start, stop) of each flattened tensor."""

    @property
    def contributes(self) -> bool:
        """Tell whether what this rank holds counts when a tensor is put together from all ranks."""

    @property
    def device(self) -> torch.device:
        """Return where tensors can be sent to other ranks from."""

    def records(self) -> list[TensorRecord]:
        """Return the tensors that this rank knows of, shapes whole; others may know more optimizer state."""

    def expected_state(self) -> tuple[str, ...]:
        """Return the words of what the optimizer will keep for each number of a parameter; none where it keeps less."""

    def is_whole(self, record: TensorRecord) -> bool:
        """Tell whether every rank holds all of the tensor."""

    def local_range(self, record: TensorRecord) -> tuple[int, int]:
        """Return [start, stop)."""

    def read(self, record: TensorRecord) -> Tensor:
        """Return this rank's elements, flat, wherever they lie; not to be written to."""

    def write(self, record: TensorRecord, values: Tensor) -> None:
        """Write this rank's elements, given flat."""

    def adopt(self, record: TensorRecord, values: Tensor) -> bool:
        """Make these very elements, all of them and flat, the optimizer's state, if that can be; tell whether it was.

        They are the optimizer's from then on.
        """

    def read_scalars(self) -> Scalars:
        """Return the numbers that this rank knows of."""

    def write_scalars(self, scalars: Scalars) -> None:
        """Write the optimizer's numbers; raises CheckpointError where this strategy cannot tell parameters apart."""

    def forget(self, names: Iterable[str]) -> None:
        """Take back the optimizer state of parameters that have not been updated yet."""

    def begin_reading(self) -> None:
        """Put everything where it can be read."""

    def begin_writing(self) -> None:
        """Make optimizer state to be written into; parameters may change and must all be written afterwards."""

    def finish_writing(self) -> None:
        """Hand what was written on to the copies that training uses. Collective."""

    @property
    def loss_scale(self) -> LossScale:
        """Return the loss scale of fp16."""
