"""Parts of tensors are sent straight from the ranks that hold them to the one that is to have the whole."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from finetune.runtime import ranks

CHUNK_ELEMENTS = 1 << 24
"""Elements of a tensor that are on their way at once (64 MiB): on a GPU, what arrives needs its memory."""


@dataclass(frozen=True)
class Parcel:
    """One tensor that is put together on its owner, flat; what each rank holds of it is known to all."""

    owner: int
    spans: Sequence[tuple[int, int]]  # by rank: elements [start, stop); empty where a rank has nothing to send
    own: Tensor  # this rank's elements
    into: Tensor | None  # on the owner: the whole one, in host memory


def exchange(parcels: Sequence[Parcel], *, device: torch.device) -> None:
    """Bring every parcel to its owner, bit by bit as it is; `device` is where ranks can send from. Collective.

    Every rank passes the same parcels in the same order, and whatever is sent to it has been asked for before it waits,
    so nobody can wait in a circle.
    """
    longest = max((stop for parcel in parcels for _, stop in parcel.spans), default=0)
    for first in range(0, longest, CHUNK_ELEMENTS):
        transfers = _Transfers(device)
        for parcel in parcels:
            _add(transfers, parcel, first=first, last=first + CHUNK_ELEMENTS)
        transfers.finish()


def _add(transfers: "_Transfers", parcel: Parcel, *, first: int, last: int) -> None:
    me = ranks.rank()
    for sender in range(ranks.world()) if me == parcel.owner else (me,):
        start, stop = parcel.spans[sender]
        low, high = max(first, start), min(last, stop)
        if low >= high:
            continue
        if me != parcel.owner:
            transfers.send(parcel.own[low - start : high - start], to=parcel.owner)
            continue
        assert parcel.into is not None, "the owner has a place for it"
        if sender == me:
            parcel.into[low:high].copy_(parcel.own[low - start : high - start])
        else:
            transfers.receive(parcel.into[low:high], sender=sender)


@dataclass
class _Transfers:
    """What this rank sends and receives at one time."""

    device: torch.device
    wanted: list[dist.P2POp] = field(default_factory=list)
    arriving: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # place in host memory, and where it arrives

    def send(self, values: Tensor, *, to: int) -> None:
        self.wanted.append(dist.P2POp(dist.isend, _bytes(values.contiguous()).to(self.device), to))

    def receive(self, place: Tensor, *, sender: int) -> None:
        target = _bytes(place)
        if self.device.type != "cpu":
            target = torch.empty_like(target, device=self.device)
            self.arriving.append((_bytes(place), target))
        self.wanted.append(dist.P2POp(dist.irecv, target, sender))

    def finish(self) -> None:
        if not self.wanted:
            return
        for work in dist.batch_isend_irecv(self.wanted):
            work.wait()
        for place, arrived in self.arriving:
            place.copy_(arrived)  # waits for the device


def _bytes(values: Tensor) -> Tensor:
    """Return the values as bytes, which every backend sends as they are."""
    return values.detach().view(torch.uint8)
