"""More threads give the same bits sooner."""

import threading
import time

import pytest
import torch

from finetune.errors import TrainingError
from finetune.export import threads as threading_of_export
from finetune.export.threads import map_in_threads, num_threads_for


def product(seed):
    chance = torch.Generator().manual_seed(seed)
    one, other = (torch.randn(64, 300, generator=chance, dtype=torch.float64) for _ in range(2))
    return one @ other.T


def test_the_order_is_kept_and_the_bits_are_those_of_one_thread():
    alone, several = (map_in_threads(product, range(20), num_threads=number) for number in (1, 4))
    assert all(map(torch.equal, alone, several))
    assert torch.equal(several[3], product(3))


def test_items_are_worked_on_at_once_each_with_one_thread_of_torch_and_without_gradients():
    together = threading.Barrier(3, timeout=20)
    before = torch.get_num_threads()

    def meet(item):
        together.wait()
        return torch.get_num_threads(), torch.is_grad_enabled()

    assert map_in_threads(meet, range(3), num_threads=3) == [(1, False)] * 3
    assert torch.get_num_threads() == before


def test_the_first_error_is_raised_and_the_rest_is_not_begun():
    begun = []

    def work(item):
        begun.append(item)
        if item == 0:
            raise TrainingError("not finite")
        time.sleep(0.01)

    with pytest.raises(TrainingError, match="not finite"):
        map_in_threads(work, range(1000), num_threads=2)
    assert len(begun) < 1000


def test_threads_are_bounded_by_cores_and_by_memory(monkeypatch):
    monkeypatch.setattr(threading_of_export, "usable_cores", lambda: 64)
    monkeypatch.setattr(threading_of_export, "available_bytes", lambda: 100)
    assert num_threads_for() == 16
    assert num_threads_for(10) == 5
    assert num_threads_for(1000) == 1
