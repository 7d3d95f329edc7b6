"""Batches on the device one step early: the next step's are copied while this one computes."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from finetune.data.batch import Batch

Group = tuple[Batch, ...]


class CopyStream(Protocol):
    """Where copies run concurrently with the computation."""

    def beside(self) -> AbstractContextManager[Any]:
        """Return a context in which copies do not wait for what is being computed."""

    def wait_and_keep(self, group: Group) -> None:
        """Have what is computed next wait for the copies, and keep their memory until it is done."""


class DeviceCopyStream:
    """A stream of an accelerator of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.get_device_module(device)
        self._stream = self._device.Stream(device)

    def beside(self) -> AbstractContextManager[Any]:
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


def prefetch_to_device(groups: Iterator[Group], device: torch.device) -> Iterator[Group]:
    """Yield the groups with their tensors on the device; what is on the CPU already is handed on as it is."""
    return groups if device.type == "cpu" else prefetch(groups, device, line=DeviceCopyStream(device))


def prefetch(groups: Iterator[Group], device: torch.device, *, line: CopyStream) -> Iterator[Group]:
    """Yield the groups on the device; the copy of the next one is under way before one is handed out.

    It is fast and waits for nothing where the groups are in page-locked memory.
    """
    coming = _start_copy(groups, device, line=line)
    while coming is not None:
        group = coming
        line.wait_and_keep(group)
        coming = _start_copy(groups, device, line=line)
        yield group


def _start_copy(groups: Iterator[Group], device: torch.device, *, line: CopyStream) -> Group | None:
    group = next(groups, None)
    if group is None:
        return None
    with line.beside():
        return tuple(batch.to(device, non_blocking=True) for batch in group)
