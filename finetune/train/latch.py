"""Keeps updates out on the device, without the host's knowing yet."""

import torch
from torch import Tensor


class Latch:
    """Flags every step whose gradient is not finite, and all steps after one more of them than is allowed."""

    def __init__(self, device: torch.device) -> None:
        self._num_unread = torch.zeros((), device=device)  # steps left out of which the host knows nothing yet
        self._is_on_cpu = device.type == "cpu"
        self._copy: Tensor | None = None  # of that number, on its way to the host
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
        """Tell whether it has come to the host that a step was left out; never waits, so ranks may differ."""
        if self._copy is None or (self._arrival is not None and not self._arrival.query()):
            return False
        found, self._copy = bool(self._copy.item()), None
        return found

    def settle(self) -> None:
        """Begin anew: the host knows of every step by now."""
        self._num_unread.zero_()
        self._copy = None

    def _send(self) -> None:
        """Send the number on its way, unless one is under way already."""
        if self._copy is not None:
            return
        if self._is_on_cpu:
            self._copy = self._num_unread.clone()
            return
        self._copy = self._num_unread.to("cpu", non_blocking=True)  # torch pins what it copies to
        self._arrival = torch.Event(device=self._num_unread.device)
        self._arrival.record()
