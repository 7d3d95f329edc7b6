"""Copies of the state take the memory that is planned for them, not the next power of two."""

import gc
from types import SimpleNamespace

import psutil
import torch

from finetune.checkpoint.sharding.gather import plan_files
from finetune.checkpoint.write import writer
from finetune.checkpoint.write.writer import PAGE_BYTES, PinnedMemory, StateSource, host_memory_bytes, pinned_size
from finetune.errors import CheckpointError
from tests.checkpoint.small_run import Run
from tests.devices import EVERY_DEVICE
from tests.refusals import refused


class Driver:
    """Stands for the CUDA driver: keeps what is locked, and refuses what overlaps."""

    def __init__(self):
        self.locked = {}

    def register(self, address, size):
        assert address % PAGE_BYTES == size % PAGE_BYTES == 0
        assert all(address + size <= other or address >= other + length for other, length in self.locked.items())
        self.locked[address] = size

    def unregister(self, address):
        del self.locked[address]


def test_pages_are_locked_alone_and_unlocked_with_the_buffer():
    driver = Driver()
    sizes = [1, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES, 100_001]
    buffers = [PinnedMemory(size, register=driver.register, unregister=driver.unregister) for size in sizes]
    assert [each.bytes.numel() for each in buffers] == sizes
    assert all(not each.bytes.any() for each in buffers)
    assert sum(driver.locked.values()) <= sum(map(pinned_size, sizes))
    view = buffers[0].bytes
    del buffers
    gc.collect()
    assert driver.locked == {}
    assert view.tolist() == [0]  # ordinary memory from then on


def test_a_refusal_of_the_driver_is_an_error(monkeypatch):
    driver = SimpleNamespace(cudaHostRegister=lambda address, size, flags: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    with refused(CheckpointError, "4.1", "`checkpoint.asynchronous: false`"):
        PinnedMemory(10)


def test_a_capture_pins_exactly_the_planned_buffers(tmp_path, monkeypatch):
    driver = Driver()
    monkeypatch.setattr(
        writer, "PinnedMemory", lambda size: PinnedMemory(size, register=driver.register, unregister=driver.unregister)
    )
    run = Run(tmp_path, width=5000).train(range(1), save=False)
    source = StateSource(run.access, copies=True)
    monkeypatch.setattr(run.access, "device", torch.device("cuda"))
    planned = plan_files(run.access.records(), world=1)
    source._allocate(planned)
    size = sum(record.size_bytes for file in planned for record in file.records)
    assert size <= sum(driver.locked.values()) <= host_memory_bytes(planned) <= size + 2 * PAGE_BYTES * len(planned)
    source._allocate(())
    gc.collect()
    assert driver.locked == {}


@EVERY_DEVICE
def test_pinned_memory_has_the_planned_size(device, figure):
    """On a GPU 9.7 GB in three blocks, for which torch's own allocator takes 16 GB."""
    sizes = [4_300_000_000, 4_300_000_000, 1_100_000_000] if device == "cuda" else [430_001, 11_000_000]
    noop = {} if device == "cuda" else {"register": lambda *_: None, "unregister": lambda *_: None}
    before = psutil.virtual_memory().available
    buffers = [PinnedMemory(size, **noop) for size in sizes]
    assert sum(map(pinned_size, sizes)) <= 1.1 * sum(sizes)
    if device == "cuda":
        taken = before - psutil.virtual_memory().available
        own = sum(stats for name, stats in torch.cuda.host_memory_stats().items() if name == "allocated_bytes.current")
        figure("pinned memory, of planned", max(taken, own + sum(sizes)) / sum(sizes), at_most=1.1)
        assert all(each.bytes.is_pinned() for each in buffers)
        source = torch.ones(sizes[0] // 4, device="cuda")
        buffers[0].bytes.view(torch.float32).copy_(source)
        assert buffers[0].bytes.view(torch.float32)[-1].item() == 1.0
        del source
        torch.cuda.empty_cache()
    assert [each.bytes.numel() for each in buffers] == sizes
