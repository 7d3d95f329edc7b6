"""Differences between ranks, and measurements between them."""

from dataclasses import replace

import pytest

from finetune.commands.doctor.findings import Severity
from finetune.commands.doctor.job_facts import JobFacts
from finetune.commands.doctor.ranks import AllReduceSpeed, LinkFacts, PairSpeed
from tests.commands.doctor.recorded import findings_of, host_of, ranks_of

MUST, SHOULD, NOTE = Severity.MUST_FIX, Severity.SHOULD_FIX, Severity.NOTE
A10, H100 = "a10_two_sockets", "h100_nvswitch"
JOB = JobFacts(
    "job.yaml",
    num_parameters=10**9,
    num_trained=10**9,
    global_batch_size=64,
    microbatch_size=4,
    tokens_per_step=64 * 2048,
)


def launched(*ranks):
    return findings_of(host_of("cpu_node"), ranks=ranks)


def test_a_different_package_version_on_one_rank_must_be_fixed():
    first, second, third = ranks_of("a", "a", "b")
    finding = launched(first, second, replace(third, packages={"torch": "2.11.0"}))["versions"]
    assert finding.severity is MUST
    assert finding.what == "torch differs between ranks: 2.13.0 on rank 0, 1; 2.11.0 on rank 2"
    assert finding.fix.startswith("pip install torch==2.13.0")


@pytest.mark.parametrize(
    ("changes", "key", "severity", "fix"),
    [
        ({"clock_offset_seconds": -42.5}, "clock", SHOULD, "timedatectl set-ntp true"),
        ({"nccl": "2.21.5"}, "versions", MUST, "same image"),
        ({"device": "cpu"}, "rank-without-gpu", MUST, "num_processes"),
        ({"device": "NVIDIA A10"}, "rank-devices", SHOULD, "same GPUs"),
        ({"arrived_seconds": 31.0}, "late-rank", NOTE, "local disk"),
        ({"flops_per_second": 3e14}, "slow-rank", SHOULD, "power cap"),
    ],
)
def test_a_rank_that_differs_from_the_others_is_reported(changes, key, severity, fix):
    *same, last = ranks_of("a", "a", "b", "b", device="NVIDIA H100", nccl="2.27.5", flops_per_second=7e14)
    finding = launched(*same, replace(last, **changes))[key]
    assert finding.severity is severity and fix in finding.fix
    assert "3" in finding.what or "b" in finding.what


def test_equal_ranks_have_no_findings():
    keys = {"versions", "clock", "rank-without-gpu", "rank-devices", "late-rank", "slow-rank"}
    assert not keys & launched(*ranks_of("a", "a", "b", "b", flops_per_second=1e12)).keys()


def link(seconds, *pairs, backend="nccl"):
    return LinkFacts(backend, (AllReduceSpeed(4096, 1e-4), AllReduceSpeed(256 << 20, seconds)), pairs)


def test_a_slow_pair_of_ranks_is_reported_with_its_link():
    ranks = ranks_of(*4 * ("rack-7",), device="NVIDIA A10", flops_per_second=6e13)
    pairs = [PairSpeed(0, 1, 2e-5, 2e10), PairSpeed(0, 2, 2e-5, 3e9), PairSpeed(2, 3, 2e-5, 2e10)]
    finding = findings_of(host_of(A10), ranks=ranks, link=link(0.02, *pairs))["slow-pair"]
    assert "rank 0 (rack-7) and rank 2 (rack-7) exchange 3.0 GB/s over SYS" in finding.what
    assert "NCCL_P2P_DISABLE=1" in finding.fix


def test_pairs_across_machines_are_compared_only_with_each_other():
    ranks = ranks_of("a", "a", "b", "b")
    pairs = [
        PairSpeed(0, 1, 1e-5, 9e9),
        PairSpeed(0, 2, 1e-4, 1e9),
        PairSpeed(1, 3, 1e-4, 1e9),
        PairSpeed(1, 2, 1e-4, 2e8),
    ]
    hosts = [host_of("cpu_node", hostname=name) for name in ("a", "b")]
    finding = findings_of(*hosts, ranks=ranks, link=link(0.5, *pairs, backend="gloo"))["slow-pair"]
    assert "rank 1 (a) and rank 2 (b)" in finding.what and "ethtool" in finding.fix


def test_pairs_of_processes_on_one_cpu_are_not_compared():
    pairs = [PairSpeed(0, 1, 1e-5, 9e9), PairSpeed(0, 2, 1e-4, 1e9), PairSpeed(1, 2, 1e-4, 9e9)]
    facts = {"ranks": ranks_of("a", "a", "a"), "link": link(0.5, *pairs, backend="gloo")}
    assert "slow-pair" not in findings_of(host_of("cpu_node", hostname="a"), **facts)


def test_unused_nvlink_is_detected_by_the_speed_of_all_reduces():
    ranks = ranks_of(*8 * ("dgx-01",), device="NVIDIA H100", flops_per_second=7e14)
    assert "nvlink-unused" not in findings_of(host_of(H100), ranks=ranks, link=link(0.001))
    assert "fabricmanager" in findings_of(host_of(H100), ranks=ranks, link=link(0.1))["nvlink-unused"].fix


def test_a_fast_link_suits_all_strategies_and_a_slow_one_needs_a_larger_batch():
    ranks = ranks_of(*8 * ("dgx-01",), device="NVIDIA H100", flops_per_second=7e14)
    suits = findings_of(host_of(H100), ranks=ranks, link=link(0.001), job=JOB)["strategy"]
    assert suits.what == "this link suits ddp, zero1, zero2, fsdp2, zero3"
    slow = findings_of(host_of(H100), ranks=ranks, link=link(1.0), job=JOB)["link-bound"]
    assert slow.severity is SHOULD and slow.fix.startswith("train.global_batch_size: ")
    batch = int(slow.fix.split()[1])
    assert batch % 32 == 0 and batch > 64
    again = replace(JOB, global_batch_size=batch, tokens_per_step=batch * 2048)
    assert "link-bound" not in findings_of(host_of(H100), ranks=ranks, link=link(1.0), job=again)
