"""The time of a step, worked out by hand for each part."""

from dataclasses import replace

import pytest

from finetune.commands.plan import step_time as module
from finetune.commands.plan.assumptions import LAUNCH_SECONDS
from finetune.commands.plan.step_time import Cluster, Device, Work, step_time

DEVICE = Device(flops=100e12, memory_bandwidth=1e12 / module.MEMORY_SHARE, pcie_bandwidth=20e9, host_bandwidth=30e9)
ONE = Cluster(1, 1, 100e9, 10e9)
EIGHT = Cluster(8, 8, 100e9, 10e9)

WORK = Work(
    num_tokens=10_000,
    num_microbatches=2,
    flops_per_token=6e9,
    recomputed_flops_per_token=0.0,
    traffic_per_token=10e6,
    num_layers=10,
    num_parameters=10**9,
    num_trained=10**9,
    weight_bytes=2e9,
    gradient_bytes=4e9,
    trained_weight_bytes=2e9,
)
PASS = 0.6 + 0.1  # 10,000 x 6 GFLOP at 100 TFLOP/s, and 10,000 x 10 MB at 1 TB/s


def test_one_device_computes_and_updates():
    """Two microbatches of 0.7 s; 36 bytes of each of a billion parameters at 1 TB/s are 36 ms."""
    found = step_time("single", WORK, device=DEVICE, cluster=ONE)
    nothing = dict.fromkeys(("communication", "contention", "stragglers"), 0.0)
    assert found.parts == pytest.approx({"computation": 2 * PASS, **nothing, "update": 0.036})
    assert found.seconds == pytest.approx(2 * PASS + 0.036)


def test_a_small_model_is_bound_by_memory_or_by_the_host():
    """100 tokens of 6 GFLOP take 6 ms, as reading 2 GB of weights three times does; 10 layers at 1.2 ms take 12."""
    small = replace(WORK, num_tokens=100, num_microbatches=1, traffic_per_token=0.0)
    assert step_time("single", small, device=DEVICE, cluster=ONE).parts["computation"] == pytest.approx(0.012)
    heavy = replace(small, weight_bytes=20e9)
    assert step_time("single", heavy, device=DEVICE, cluster=ONE).parts["computation"] == pytest.approx(0.06)


def test_ddp_reduces_once_a_step_during_the_last_backward_pass():
    """4 GB x 7/4 at 100 GB/s are 70 ms, less than the backward pass: the last of 153 buckets is waited for."""
    found = step_time("ddp", WORK, device=DEVICE, cluster=EIGHT)
    buckets = 153 * (LAUNCH_SECONDS + 14 * EIGHT.hop_seconds)  # each also starts, and goes round twice
    assert found.parts["communication"] == pytest.approx((0.07 + buckets) / 153)
    assert found.hidden_seconds == pytest.approx((0.07 + buckets) * 152 / 153)
    assert found.parts["update"] == pytest.approx(0.036)


def test_fsdp2_gathers_twice_and_reduces_for_each_microbatch():
    """Forward: 17.5 ms of gathering; backward: that and 35 ms of reducing; a tenth of each is waited for, twice."""
    found = step_time("fsdp2", WORK, device=DEVICE, cluster=EIGHT)
    assert found.parts["communication"] == pytest.approx(2 * (0.00175 + 0.00525), rel=2e-2)
    assert found.parts["communication"] + found.hidden_seconds == pytest.approx(2 * 0.07, rel=2e-2)
    assert found.parts["update"] == pytest.approx(0.036 / 8)


def test_zero2_reduces_after_each_microbatch_and_gathers_updated_weights():
    """Both all-reduce as DDP does; the gathering of 2 GB, 17.5 ms, is not hidden; ZeRO-1 reduces once."""
    ddp, one, two = (step_time(name, WORK, device=DEVICE, cluster=EIGHT) for name in ("ddp", "zero1", "zero2"))
    assert one.parts["communication"] - ddp.parts["communication"] == pytest.approx(0.0175, rel=1e-2)
    assert two.parts["communication"] - one.parts["communication"] == pytest.approx(ddp.parts["communication"])
    assert two.hidden_seconds == pytest.approx(2 * one.hidden_seconds)


def test_an_offloaded_optimizer_updates_on_the_host_and_moves_gradients_and_weights():
    """An eighth of a billion: 30 bytes each at 30 GB/s; (4 + 2) GB / 8 over PCIe; ZeRO-3 brings weights in, too."""
    found = step_time("zero2_offload", WORK, device=DEVICE, cluster=EIGHT)
    assert found.parts["update"] == pytest.approx(0.125)
    assert found.parts["transfers"] == pytest.approx(6e9 / 8 / 20e9)
    third = step_time("zero3_offload", WORK, device=DEVICE, cluster=EIGHT)
    assert third.parts["transfers"] == pytest.approx((6e9 + 4 * 2e9) / 8 / 20e9)


def test_ranks_that_share_layers_wait_for_every_sum():
    """Four groups of two: FSDP2's step of four ranks, and 40 sums of 20 MB at 100 GB/s for each of two microbatches."""
    shared = replace(WORK, tensor_size=2, num_sums=40, summed_bytes_per_token=2_000.0)
    found = step_time("fsdp2_tensor_parallel", shared, device=DEVICE, cluster=EIGHT)
    four = step_time("fsdp2", WORK, device=DEVICE, cluster=Cluster(4, 4, 100e9, 10e9))
    sums = 80 * (2 * 20e6 * (1 / 2) / 100e9)
    assert found.parts["communication"] - four.parts["communication"] == pytest.approx(sums, rel=0.25)  # and latency
    assert found.parts["computation"] == four.parts["computation"]
    alone = step_time("tensor_parallel", shared, device=DEVICE, cluster=Cluster(2, 2, 100e9, 10e9))
    assert alone.parts["communication"] == pytest.approx(sums, rel=0.25)
