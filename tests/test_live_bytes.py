"""What the memory tests of a CPU stand on: live bytes are those of the tensors that one can still reach."""

import gc

import torch

from tests.devices import EVERY_DEVICE
from tests.live_bytes import LiveBytes, peak_memory

MEGABYTE = 1 << 20


def ones(megabytes: int, device: str = "cpu") -> torch.Tensor:
    return torch.ones(megabytes * MEGABYTE // 4, device=device)


def test_freed_tensors_are_not_live_bytes():
    with LiveBytes() as live:
        first = ones(2)
        second = first + 1
        assert live.now == live.peak == 4 * MEGABYTE
        del first
        gc.collect()
        third = second.view(2, -1).t()
        del second
        assert (live.now, live.peak) == (2 * MEGABYTE, 4 * MEGABYTE)
        del third
        assert live.now == 0
        live.peak = live.now
        assert live.peak == 0


def test_views_and_in_place_changes_of_existing_tensors_add_no_live_bytes():
    before = ones(2)
    with LiveBytes() as live:
        before.view(2, -1).add_(1).mul_(2)
        torch.add(before, 1, out=before)
        assert live.peak == 0


@EVERY_DEVICE
def test_a_backward_pass_holds_what_it_has_saved_and_the_gradients(device):
    weight = ones(4, device).requires_grad_()
    with peak_memory(device) as memory:
        (weight.exp() * 2).sum().backward()
    megabytes = memory.peak / MEGABYTE
    assert 8 <= megabytes <= 17  # the exponential, twice it and their gradients at most
    assert weight.grad is not None
