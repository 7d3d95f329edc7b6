"""The findings on recorded machines, and on those with a fault; each has its texts and a row on the page."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from finetune.commands.doctor.checks import HOST_CHECKS, LAUNCH_CHECKS, chosen_interfaces
from finetune.commands.doctor.facts import HubName
from finetune.commands.doctor.findings import Severity, finding_texts
from finetune.commands.doctor.network import HubFacts
from finetune.commands.doctor.ranks import AllReduceSpeed, LinkFacts, PairSpeed
from finetune.commands.doctor.system import Lock
from tests.commands.doctor.recorded import NAMES, findings_of, host_of, ranks_of

H100, A10, CPU = "h100_nvswitch", "a10_two_sockets", "cpu_node"
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "before-a-run.md"

EXPECTED = {
    "h100_nvswitch": {},
    "a10_two_sockets": {"driver-too-old": "for CUDA 12.4"},
    "laptop_4060": {"disk-full": "finetune checkpoint prune", "hub": "HF_HUB_OFFLINE=1"},
    "cpu_node": {"shared-memory": "--shm-size=8g"},
}


def test_every_finding_has_its_texts_and_a_row_on_the_page():
    keys = {*HOST_CHECKS, *LAUNCH_CHECKS}
    assert len(keys) > 15 and keys == finding_texts().keys()
    assert all(texts.keys() == {"what", "why", "fix"} and all(texts.values()) for _, texts in finding_texts().values())
    section = PAGE.read_text().split("\n## Check the machine\n")[1]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {key for row in rows for key in re.findall(r"`([a-z0-9-]+)`", row)} == keys


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_machine_has_exactly_the_expected_findings(name):
    findings = findings_of(host_of(name))
    assert findings.keys() == EXPECTED[name].keys()
    assert [key for key, fix in EXPECTED[name].items() if fix not in findings[key].fix] == []


def with_gpu(index=2, **changes):
    """Return the H100 machine with one GPU changed."""
    gpus = list(host_of(H100).gpus.gpus)
    gpus[index] = replace(gpus[index], **changes)
    return {"gpus": {"gpus": tuple(gpus)}}


HIDDEN = {"variables": {"CUDA_VISIBLE_DEVICES": ""}, "software": {"num_torch_devices": 0}}
LOCK = {"software": {"locks": (Lock("/x/lock", "/x/lock was left by a build that was killed"),)}}


@pytest.mark.parametrize(
    ("changes", "key", "fix"),
    [
        ({"gpus": {"problem": "Driver/library version mismatch"}}, "driver", "reboot"),
        ({"software": {"torch_cuda": None}}, "torch-build", "pytorch.org"),
        ({"software": {"num_torch_devices": 0}}, "torch-sees-no-gpu", "--gpus all"),
        (HIDDEN, "torch-sees-no-gpu", "unset CUDA_VISIBLE_DEVICES"),
        (with_gpu(uncorrected_errors=3), "ecc", "--gpu-reset -i 2"),
        (with_gpu(has_failed_remap=True), "ecc", "replaced"),
        (with_gpu(memory_used_bytes=30 << 30), "gpu-in-use", "nvidia-smi"),
        ({"variables": {"NCCL_P2P_DISABLE": "1"}}, "p2p-off", "unset NCCL_P2P_DISABLE"),
        ({"variables": {"NCCL_SOCKET_IFNAME": "docker0"}}, "socket-interface", "export NCCL_SOCKET_IFNAME=bond0"),
        ({"variables": {"GLOO_SOCKET_IFNAME": "eth9"}}, "socket-interface", "export GLOO_SOCKET_IFNAME=bond0"),
        ({"system": {"max_open_files": 500}}, "open-files", "nofile=515"),
        ({"system": {"shared_memory_bytes": 64 << 20}}, "shared-memory", "--shm-size=8g"),
        (LOCK, "build-lock", "rm /x/lock"),
        ({"variables": {"CUDA_LAUNCH_BLOCKING": "1"}}, "variable", "unset CUDA_LAUNCH_BLOCKING"),
        ({"variables": {"NCCL_ALGO": "Ring"}}, "variable", "unset NCCL_ALGO"),
        ({"variables": {"NCCL_IB_DISABLE": "1"}}, "variable", "unset NCCL_IB_DISABLE"),
    ],
)
def test_each_fault_of_a_server_is_reported_with_its_fix(changes, key, fix):
    findings = findings_of(host_of(H100, **changes))
    assert list(findings) == [key] and fix in findings[key].fix


def test_a_driver_that_runs_a_newer_cuda_through_cuda_compat_is_not_too_old():
    assert findings_of(host_of(A10, software={"num_torch_devices": 4})) == {}


def test_a_finding_of_some_machines_names_them():
    hosts = [host_of(H100, hostname=name, network={"host_address": "127.0.1.1"}) for name in ("a", "b")]
    finding = findings_of(*hosts)["gloo-loopback"]
    assert finding.severity is Severity.MUST_FIX and "GLOO_SOCKET_IFNAME=bond0" in finding.fix and finding.hosts == ()
    assert findings_of(hosts[0], host_of(H100, hostname="c"))["gloo-loopback"].hosts == ("a",)


@pytest.mark.parametrize(
    ("value", "names"),
    [("bond", ["bond0"]), ("=bond", []), ("=bond0,lo", ["lo", "bond0"]), ("^docker,lo", ["bond0"]), ("eth", [])],
)
def test_interfaces_are_chosen_as_nccl_chooses_them(value, names):
    assert [each.name for each in chosen_interfaces(value, host_of(H100).network.interfaces)] == names


def test_an_unreachable_hub_must_be_fixed_only_if_the_job_needs_it():
    host = host_of(H100, hub=HubFacts("https://huggingface.co", problem="timed out"))
    names = (
        HubName("model.name", "Qwen/Qwen3-8B", "model", True),
        HubName("data.train.name", "tatsu-lab/alpaca", "dataset", False),
    )
    assert findings_of(host, job=names[:1])["hub"].severity is Severity.NOTE
    finding = findings_of(host, job=names)["not-cached"]
    assert "hf download tatsu-lab/alpaca --repo-type dataset" in finding.fix and "Qwen" not in finding.what


@pytest.mark.parametrize(
    ("changes", "key", "what"),
    [
        (
            {"versions": {"torch": "2.11.0", "NCCL": "2.27.5"}},
            "versions",
            "torch differs between ranks: 2.13.0 on rank 0, 1, 2; 2.11.0",
        ),
        ({"clock_offset_seconds": -42.5}, "clock", "b differs from rank 0's by -42.5 s"),
    ],
)
def test_a_rank_that_differs_from_the_others_is_reported(changes, key, what):
    *same, last = ranks_of("a", "a", "b", "b")
    assert findings_of(host_of(H100), ranks=(*same, last)) == {}
    findings = findings_of(host_of(H100), ranks=(*same, replace(last, **changes)))
    assert list(findings) == [key] and what in findings[key].what


def link(seconds, *pairs, backend="nccl"):
    return LinkFacts(backend, (AllReduceSpeed(4096, 1e-4), AllReduceSpeed(256 << 20, seconds)), pairs)


def test_a_slow_pair_of_ranks_is_reported_with_its_link():
    ranks = ranks_of(*4 * ("rack-7",))
    pairs = [PairSpeed(0, 1, 2e10), PairSpeed(0, 2, 3e9), PairSpeed(2, 3, 2e10)]
    finding = findings_of(host_of(A10), ranks=ranks, link=link(0.02, *pairs))["slow-pair"]
    assert "rank 0 (rack-7) and rank 2 (rack-7) exchange 3.0 GB/s over SYS, other pairs 20.0 GB/s" in finding.what


@pytest.mark.parametrize(("places", "slow"), [(("a", "a", "b", "b"), True), (("a", "a", "a", "a"), False)])
def test_pairs_across_machines_are_compared_only_with_each_other_and_processes_of_one_cpu_are_not(places, slow):
    pairs = [PairSpeed(0, 1, 9e9), PairSpeed(0, 2, 1e9), PairSpeed(1, 3, 1e9), PairSpeed(1, 2, 2e8)]
    hosts = [host_of(CPU, hostname=name) for name in ("a", "b")]
    facts = {"ranks": ranks_of(*places), "link": link(0.5, *pairs, backend="gloo")}
    finding = findings_of(*hosts, **facts).get("slow-pair")
    assert (finding is not None and "rank 1 (a) and rank 2 (b)" in finding.what and "ethtool" in finding.fix) is slow


def test_unused_nvlink_is_detected_by_the_speed_of_all_reduces():
    ranks = ranks_of(*8 * ("dgx-01",))
    assert "nvlink-unused" not in findings_of(host_of(H100), ranks=ranks, link=link(0.001))
    assert "fabricmanager" in findings_of(host_of(H100), ranks=ranks, link=link(0.1))["nvlink-unused"].fix
