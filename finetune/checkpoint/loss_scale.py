"""The loss scale of fp16, wherever it is kept: Accelerate's GradScaler or DeepSpeed's own scaler."""

from collections.abc import Mapping
from typing import Any

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
