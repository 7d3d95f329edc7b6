"""Six recorded machines: the findings on each, with their fixes."""

import json
from dataclasses import asdict

import pytest

from finetune.commands.doctor.checks import Facts, read_facts
from finetune.commands.doctor.findings import Severity
from finetune.commands.doctor.gpus import parse_topology
from tests.commands.doctor.recorded import FOLDER, NAMES, findings_of, host_of

MUST, SHOULD, NOTE = Severity.MUST_FIX, Severity.SHOULD_FIX, Severity.NOTE

EXPECTED = {
    "h100_nvswitch": {"numa-affinity": (NOTE, "--enable_cpu_affinity")},
    "a10_two_sockets": {
        "driver-too-old": (MUST, "whl/cu126"),
        "power-cap": (SHOULD, "nvidia-smi -i 3 -pl 150"),
        "pcie-width": (SHOULD, "slot with all lanes"),
        "p2p-across-sockets": (SHOULD, "export NCCL_P2P_DISABLE=1"),
        "p2p-iommu": (SHOULD, "iommu=pt"),
        "nvcc": (SHOULD, "cuda-toolkit-13-0"),
        "persistence": (NOTE, "nvidia-smi -pm 1"),
        "numa-affinity": (NOTE, "--enable_cpu_affinity"),
    },
    "rtx4090_pair": {
        "no-p2p": (MUST, "export NCCL_P2P_DISABLE=1 NCCL_IB_DISABLE=1"),
        "pcie-width": (SHOULD, "slot with all lanes"),
        "gpu-in-use": (SHOULD, "kill 2311"),
        "driver-minor-version": (NOTE, "newer driver"),
        "persistence": (NOTE, "nvidia-smi -pm 1"),
    },
    "wsl2": {
        "windows-disk": (SHOULD, "run.folder"),
        "gpu-in-use": (SHOULD, "close programs in Windows"),
        "compiler": (SHOULD, "apt-get install g++"),
        "wsl": (NOTE, ".wslconfig"),
    },
    "laptop_4060": {
        "disk-full": (MUST, "finetune checkpoint prune"),
        "throttled": (SHOULD, "fans"),
        "on-battery": (SHOULD, "plug it in"),
        "driver-minor-version": (NOTE, "newer driver"),
        "persistence": (NOTE, "nvidia-smi -pm 1"),
        "hub": (NOTE, "HF_HUB_OFFLINE=1"),
    },
    "cpu_node": {
        "too-many-threads": (SHOULD, "export OMP_NUM_THREADS=8"),
        "shared-memory": (SHOULD, "--shm-size=8g"),
        "disk-slow": (SHOULD, "local SSD"),
        "memory-limit": (NOTE, "docker: --memory"),
    },
}


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_machine_has_exactly_the_expected_findings(name):
    findings = findings_of(host_of(name))
    assert {key: finding.severity for key, finding in findings.items()} == {
        key: severity for key, (severity, _) in EXPECTED[name].items()
    }
    assert [key for key, (_, fix) in EXPECTED[name].items() if fix not in findings[key].fix] == []
    assert all(finding.what and finding.why and finding.fix for finding in findings.values())


@pytest.mark.parametrize("name", ["h100_nvswitch", "a10_two_sockets", "rtx4090_pair"])
def test_the_recorded_topology_equals_the_parsed_output_of_nvidia_smi(name):
    topology = parse_topology((FOLDER / f"{name}.topo.txt").read_text())
    assert topology == host_of(name).gpus.topology
    assert len([gpu for gpu in topology.links if gpu.startswith("GPU")]) == len(host_of(name).gpus.gpus)


@pytest.mark.parametrize("name", NAMES)
def test_facts_written_as_json_are_read_back_unchanged(tmp_path, name):
    facts = Facts((host_of(name),))
    (tmp_path / "facts.json").write_text(json.dumps({"facts": asdict(facts), "findings": []}))
    assert read_facts(tmp_path / "facts.json") == facts
