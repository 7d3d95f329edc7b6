"""A rank's batches in groups, one per step; on an accelerator the next group is copied while this one is used."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from finetune.data.batch import Batch

Group = tuple[Batch, ...]


class CopyStream(Protocol):
    """Where copies run concurrently with the computation."""

    def context(self) -> AbstractContextManager[Any]:
        """Return a context in which copies do not wait for what is being computed."""

    def wait_and_keep(self, group: Group) -> None:
        """Have what is computed next wait for the copies, and keep their memory until it is done."""


class DeviceCopyStream:
    """A stream of an accelerator of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.get_device_module(device)
        self._stream = self._device.Stream(device)

    def context(self) -> AbstractContextManager[Any]:
        """Return a context in which copies do not wait for what is being computed."""
        context: AbstractContextManager[Any] = self._device.stream(self._stream)
        return context

    def wait_and_keep(self, group: Group) -> None:
        """Have what is computed next wait for the copies, and keep their memory until it is done."""
        computing = self._device.current_stream()
        computing.wait_stream(self._stream)
        for batch in group:
            for tensor in batch.tensors():
                tensor.record_stream(computing)


class StepGroups:
    """A rank's batches in groups of `num_batches`, one group per step, on the device.

    With a stream, the copy of the next group is under way before one is handed out: it is fast, and needs no
    synchronization, where the batches are in page-locked memory. Raises ValueError when the last group is not full.
    """

    def __init__(
        self, batches: Iterable[Batch], num_batches: int, device: torch.device, *, stream: CopyStream | None = None
    ) -> None:
        """Without a stream, an accelerator gets one of its own; on a CPU the batches are handed out as they are."""
        self._batches = batches
        self._num_batches = num_batches
        self._device = device
        self._stream = DeviceCopyStream(device) if stream is None and device.type != "cpu" else stream

    def __iter__(self) -> Iterator[Group]:
        batch = iter(self._batches)
        groups = zip(*[batch] * self._num_batches, strict=True)
        stream = self._stream
        if stream is None:
            yield from groups
            return
        copied = self._start_copy(groups, stream)
        while copied is not None:
            group = copied
            stream.wait_and_keep(group)
            copied = self._start_copy(groups, stream)
            yield group

    def _start_copy(self, groups: Iterator[Group], stream: CopyStream) -> Group | None:
        group = next(groups, None)
        if group is None:
            return None
        with stream.context():
            return tuple(batch.to(self._device, non_blocking=True) for batch in group)
