"""Copies on streams of their own read what is written and free what is read; a fault planted in each is found."""

from unittest.mock import patch

import pytest
import torch
from torch import nn

from finetune.checkpoint.sharding.gather import Transfer, run_transfers
from finetune.checkpoint.sharding.state_layout import ShardRange
from finetune.checkpoint.write.writer import PinnedMemory
from finetune.data.batch import Batch
from finetune.data.loader import DeviceCopyStream, StepLoader
from finetune.model import activations
from finetune.model.activations import offload_activations
from finetune.train.update import DeferredFiniteCheck
from tests.fake_gpu.device import GPU, FakeGpu
from tests.fake_gpu.machine import MACHINES, on_machine
from tests.fake_gpu.streams import DEFAULT, HOST, Block, Timeline


@pytest.fixture
def gpu():
    fake = FakeGpu()
    with on_machine(fake, MACHINES["H100"]), fake:
        yield fake


def races(gpu):
    """Return what was not ordered, without the streams."""
    return sorted(
        {sentence.partition(":")[0] for sentence in (name.replace("aten::", "") for name in gpu.timeline.races)}
    )


def test_the_rules_of_streams():
    timeline, block = Timeline(), Block(DEFAULT)
    copies = timeline.new_stream()
    timeline.work("copy", reads=[], writes=[block], stream=copies)
    timeline.work("sum", reads=[block], writes=[])
    assert timeline.races == {f"sum reads what is not yet written: {DEFAULT} does not wait for {copies}": 1}
    timeline.wait(DEFAULT, timeline.clocks[copies])
    timeline.work("sum", reads=[block], writes=[])
    timeline.work("copy", reads=[], writes=[block], stream=copies)
    assert list(timeline.races)[1:] == [f"copy writes what is still read: {copies} does not wait for {DEFAULT}"]
    timeline.wait(HOST, timeline.clocks[copies])
    timeline.work("read", reads=[block], writes=[], stream=HOST)
    assert len(timeline.races) == 2


@pytest.mark.parametrize(("is_recorded", "is_waiting"), [(False, False), (True, False), (False, True)])
def test_freed_memory_is_taken_when_recorded_streams_are_done_with_it_and_others_are_waited_for(
    is_recorded, is_waiting
):
    timeline = Timeline()
    block, copies = timeline.new_block(), timeline.new_stream()
    timeline.work("copy", reads=[block], writes=[], stream=copies)
    if is_recorded:
        block.recorded.add(copies)
    timeline.free(block)
    if is_waiting:
        timeline.wait(DEFAULT, timeline.clocks[copies])
    timeline.work("sum", reads=[], writes=[timeline.new_block()])
    found = f"sum takes memory that is still in use: {DEFAULT} does not wait for {copies}"
    assert list(timeline.races) == ([] if is_recorded or is_waiting else [found])


def prefetch(stream):
    """Use the groups of six steps, of which the next is copied meanwhile."""
    row = torch.ones(1, 4, dtype=torch.int64)
    batches = [Batch({"input_ids": row}, row, num_targets=4, num_tokens=4, sample_ids=(i,)) for i in range(6)]
    for (batch,) in StepLoader([batch.pin_memory() for batch in batches], 1, GPU, stream=stream):
        for tensor in batch.tensors():
            tensor * 2


class NeverWaits(DeviceCopyStream):
    def wait_and_keep(self, group):
        pass


class NeverRecords(DeviceCopyStream):
    def wait_and_keep(self, group):
        self._device.current_stream().wait_stream(self._stream)


def test_prefetched_batches_are_read_when_they_have_arrived_and_freed_when_they_are_used(gpu):
    prefetch(DeviceCopyStream(GPU))
    assert not races(gpu)
    assert gpu.timeline.num_ordered >= 6  # each batch's tensors are read after their copy


@pytest.mark.parametrize(
    ("fault", "found"),
    [(NeverWaits, "mul reads what is not yet written"), (NeverRecords, "_to_copy takes memory that is still in use")],
)
def test_a_missing_wait_of_the_prefetch_is_found(gpu, fault, found):
    prefetch(fault(GPU))
    assert found in races(gpu)


def offload():
    """Take two steps of a model whose activations are offloaded, and return it: what it prefetched is not freed."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(5))).to("cuda")
    offload_activations(model, smallest_bytes=0)
    for _ in range(2):
        model(torch.ones(2, 4, device="cuda")).sum().backward()
    return model


def test_offloaded_activations_are_read_when_they_have_arrived_and_freed_when_they_have_left(gpu):
    model = offload()
    assert not races(gpu)
    assert all(weight.grad.is_cuda for weight in model.parameters())
    assert gpu.timeline.num_ordered > 20


def no_wait_before_copy(self, source, target):
    with torch.cuda.stream(self._stream):
        target.copy_(source, non_blocking=True)
        return self._stream.record_event()


@pytest.mark.parametrize(
    ("method", "fault", "found"),
    [
        ("wait", lambda self, arrival: None, "reads what is not yet written"),
        ("_copy", no_wait_before_copy, "copy_ reads what is not yet written"),
        ("_release", lambda self, keep: self._leaving.clear(), "takes memory that is still in use"),
    ],
)
def test_a_missing_wait_of_the_offload_is_found(gpu, method, fault, found):
    with patch.object(activations.CudaStreamCopies, method, fault):
        offload()
    assert any(found in race for race in races(gpu))


def snapshot():
    """Copy a weight into page-locked memory and return its bytes, as the thread does that writes the file."""
    weight = torch.ones(8, device="cuda")
    memory = PinnedMemory(weight.numel() * 4)
    destination = memory.bytes.view(torch.float32)
    run_transfers([Transfer(0, [ShardRange(0, 8)], weight, destination)], device=GPU)
    return destination.numpy().sum()


def test_a_snapshot_is_written_to_disk_when_it_has_arrived(gpu):
    assert snapshot() == 8.0
    assert not races(gpu)
    assert gpu.timeline.num_ordered > 0


def test_a_missing_wait_of_the_snapshot_is_found(gpu):
    copy = torch.Tensor.copy_
    with patch.object(torch.Tensor, "copy_", lambda target, source: copy(target, source, non_blocking=True)):
        snapshot()
    assert races(gpu) == ["a read by the host reads what is not yet written"]


@pytest.mark.parametrize(
    ("is_faulty", "found"), [(False, []), (True, ["_local_scalar_dense reads what is not yet written"])]
)
def test_the_host_reads_a_skipped_step_when_its_flag_has_arrived(gpu, is_faulty, found):
    check = DeferredFiniteCheck(GPU)
    check.flag(torch.tensor(float("inf")).pin_memory().to("cuda", non_blocking=True), num_allowed=0)
    if is_faulty:
        check._arrival = None
    assert check.has_news
    assert races(gpu) == found
