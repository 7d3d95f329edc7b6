"""The bytes that strategies send, by hand."""

import pytest

from finetune.commands.doctor.facts import Facts
from finetune.commands.doctor.strategies import bus_bandwidth, compute_seconds, strategy_costs
from finetune.commands.doctor.subjects.job import JobFacts
from finetune.commands.doctor.subjects.ranks import AllReduceSpeed, LinkFacts, pairs_to_measure
from tests.commands.doctor.recorded import ranks_of

LINK = LinkFacts("gloo", (AllReduceSpeed(4096, 1e-4), AllReduceSpeed(10**9, 1.5)))


def facts(job=None):
    return Facts((), ranks_of("a", "a", "b", "b", flops_per_second=1e12), LINK, job)


def test_bus_bandwidth_of_four_ranks_is_one_and_a_half_times_the_algorithm_bandwidth():
    assert bus_bandwidth(LINK, world=4) == pytest.approx(1e9)


def test_bytes_sent_per_step_with_full_fine_tuning():
    job = JobFacts("j", num_parameters=10**9, num_trained=10**9, item_bytes=2, global_batch_size=16, microbatch_size=2)
    costs = {cost.name: cost.num_bytes for cost in strategy_costs(facts(job))}
    assert costs == {
        "ddp": 1.5 * 4e9,  # gradients in float32, twice three quarters
        "zero1, zero2": 1.5 * 4e9 + 0.75 * 2e9,  # and the updated weights
        "fsdp2, zero3": 0.75 * (2 * 2 * 2e9 + 4e9),  # weights twice in each of 2 microbatches, gradients once
    }


def test_an_adapter_reduces_the_communication_of_ddp_and_not_of_fsdp():
    job = JobFacts("j", num_parameters=10**9, num_trained=10**7, item_bytes=2, global_batch_size=8, microbatch_size=2)
    ddp, _, fsdp = strategy_costs(facts(job))
    assert ddp.seconds == pytest.approx(0.06) and fsdp.seconds > 50 * ddp.seconds


def test_compute_time_counts_six_operations_per_parameter_and_token():
    job = JobFacts("j", num_parameters=10**9, num_trained=10**9, tokens_per_step=4000)
    assert compute_seconds(facts(job)) == pytest.approx(6e9 * 1000 / 0.5e12)
    assert compute_seconds(facts()) is None


def test_all_pairs_of_a_small_world_and_neighbors_in_a_large_one_are_measured():
    assert len(pairs_to_measure(8)) == 28
    assert pairs_to_measure(64)[-1] == (62, 63) and len(pairs_to_measure(64)) == 63
