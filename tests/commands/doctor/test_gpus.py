"""Drivers, the state of GPUs, and how they are connected."""

from dataclasses import replace

import pytest

from finetune.commands.doctor.findings import Severity
from finetune.commands.doctor.gpus import parse_topology, read_topology
from tests.commands.doctor.recorded import FOLDER, findings_of, host_of, ranks_of

H100, A10, RTX = "h100_nvswitch", "a10_two_sockets", "rtx4090_pair"


def with_gpu(machine, index=0, **changes):
    """Return a recorded machine with one GPU changed."""
    gpus = list(host_of(machine).gpus.gpus)
    gpus[index] = replace(gpus[index], **changes)
    return host_of(machine, gpus={"gpus": tuple(gpus)})


def test_a_driver_that_does_not_answer_must_be_fixed():
    host = host_of("cpu_node", gpus={"has_driver": True, "problem": "Driver/library version mismatch"})
    finding = findings_of(host)["driver"]
    assert finding.severity is Severity.MUST_FIX
    assert "version mismatch" in finding.what and "reboot" in finding.fix


def test_a_cpu_build_of_torch_next_to_a_driver_is_reported_with_the_matching_build():
    finding = findings_of(host_of(A10, software={"torch_cuda": None}))["torch-build"]
    assert finding.severity is Severity.MUST_FIX and finding.fix.endswith("whl/cu126")
    assert findings_of(host_of(H100, software={"torch_cuda": None}))["torch-build"].fix.endswith("whl/cu128")


def test_forward_compatibility_is_accepted_only_on_data_center_gpus():
    library = "/usr/local/cuda/compat/libcuda.so.1"
    a10 = host_of(A10, software={"compatibility_library": library, "num_torch_devices": 4, "nccl": "2.27.5"})
    assert "driver-too-old" not in findings_of(a10) and "forward-compatibility" not in findings_of(a10)
    finding = findings_of(host_of(RTX, software={"compatibility_library": library}))["forward-compatibility"]
    assert finding.severity is Severity.MUST_FIX and "LD_LIBRARY_PATH" in finding.fix
    newer = findings_of(host_of(H100, software={"compatibility_library": library}))["forward-compatibility"]
    assert newer.severity is Severity.SHOULD_FIX


def test_a_gpu_without_kernels_in_torch_must_be_fixed():
    finding = findings_of(with_gpu(RTX, capability=(12, 0)))["architecture"]
    assert finding.severity is Severity.MUST_FIX and "sm_120" in finding.what and "cu128" in finding.fix


def test_gpus_that_torch_does_not_see_and_a_missing_nccl_are_reported():
    assert "torch-sees-no-gpu" in findings_of(host_of(H100, software={"num_torch_devices": 0}))
    assert findings_of(host_of(H100, software={"nccl": None}))["nccl"].severity is Severity.MUST_FIX


@pytest.mark.parametrize(
    ("changes", "key", "severity", "fix"),
    [
        ({"uncorrected_errors": 3}, "ecc", Severity.SHOULD_FIX, "--gpu-reset -i 2"),
        ({"remap_failed": True}, "ecc", Severity.MUST_FIX, "replaced"),
        ({"power_limit_watts": 400.0}, "power-cap", Severity.SHOULD_FIX, "-i 2 -pl 700"),
        ({"throttle_reasons": ("hardware power brake",)}, "throttled", Severity.SHOULD_FIX, "power cables"),
        ({"temperature_celsius": 84}, "throttled", Severity.SHOULD_FIX, "fans"),
        ({"pcie_width": 4}, "pcie-width", Severity.SHOULD_FIX, "riser"),
        ({"pcie_generation": 3, "power_watts": 600.0}, "pcie-generation", Severity.SHOULD_FIX, "BIOS"),
        ({"memory_used_bytes": 30 << 30}, "gpu-in-use", Severity.SHOULD_FIX, "nvidia-smi"),
        ({"compute_mode": "prohibited"}, "compute-mode", Severity.MUST_FIX, "-c DEFAULT"),
        ({"mig": True}, "mig", Severity.NOTE, "-mig 0"),
        ({"name": "NVIDIA A100-SXM4-80GB"}, "mixed-gpus", Severity.SHOULD_FIX, "CUDA_VISIBLE_DEVICES"),
        ({"capability": (7, 0)}, "no-bf16", Severity.NOTE, "train.precision: fp16"),
    ],
)
def test_a_problem_of_one_gpu_is_reported_with_its_fix(changes, key, severity, fix):
    finding = findings_of(with_gpu(H100, 2, **changes))[key]
    assert finding.severity is severity and fix in finding.fix


def test_the_lower_pcie_generation_of_an_idle_gpu_is_not_a_finding():
    assert "pcie-generation" not in findings_of(with_gpu(H100, pcie_generation=1, power_watts=60.0))


def test_mig_under_several_ranks_must_be_fixed():
    host = with_gpu(H100, mig=True)
    assert findings_of(host, ranks=ranks_of("dgx-01", "dgx-01"))["mig"].severity is Severity.MUST_FIX


def test_disabling_p2p_with_nvlink_is_reported():
    finding = findings_of(host_of(H100, variables={"NCCL_P2P_DISABLE": "1"}))["p2p-off"]
    assert (finding.severity, finding.fix) == (Severity.SHOULD_FIX, "unset NCCL_P2P_DISABLE")


def test_links_across_sockets_are_not_reported_when_p2p_is_disabled():
    findings = findings_of(host_of(A10, variables={"NCCL_P2P_DISABLE": "1"}))
    assert not {"p2p-off", "p2p-across-sockets", "p2p-iommu"} & findings.keys()


def test_an_rtx_4090_whose_driver_reports_no_p2p_is_a_note():
    host = host_of(RTX, gpus={"driver": "570.86.10", "p2p": {"0-1": "GPU not supported"}})
    finding = findings_of(host)["no-p2p"]
    assert finding.severity is Severity.NOTE and "gradient accumulation" in finding.fix


def test_p2p_across_a_host_bridge_without_iommu_is_a_note():
    host = host_of(RTX, gpus={"driver": "570.86.10"}, system={"iommu": "passthrough"})
    finding = findings_of(host)["p2p-host-bridge"]
    assert finding.severity is Severity.NOTE and "NCCL_P2P_DISABLE=1" in finding.fix


def test_gpus_without_a_network_card_on_their_socket_are_a_note():
    topology = host_of(H100).gpus.topology
    far = {
        name: {**row, **{card: "SYS" for card in row if card.startswith("NIC")}} for name, row in topology.links.items()
    }
    host = host_of(H100, gpus={"topology": replace(topology, links={**topology.links, "GPU7": far["GPU7"]})})
    assert findings_of(host)["gpu-far-from-network"].what.startswith("GPU7 ")


def test_a_topology_separated_by_blanks_with_cards_named_by_driver_is_parsed():
    """As drivers before 530 print it: no NICs with numbers, no column for the GPU's own NUMA node."""
    text = """
        GPU0    GPU1    mlx5_0  CPU Affinity    NUMA Affinity
GPU0     X      NV12    PXB     48-63,176-191   3
GPU1    NV12     X      SYS     16-31,144-159   1
mlx5_0  PXB     SYS      X
"""
    topology = parse_topology(text)
    assert topology.links["GPU0"] == {"GPU1": "NV12", "mlx5_0": "PXB"}
    assert topology.numa == {"GPU0": "3", "GPU1": "1"}


def test_a_topology_without_affinities_is_parsed():
    topology = parse_topology(
        "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tSYS\t\tN/A\nGPU1\tSYS\t X \t\tN/A\n"
    )
    assert topology.links == {"GPU0": {"GPU1": "SYS"}, "GPU1": {"GPU0": "SYS"}}
    assert topology.numa == {}


def program(folder, text):
    """Put a program `nvidia-smi` into a folder."""
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def test_the_topology_is_read_from_nvidia_smi_on_the_path(tmp_path, monkeypatch):
    program(tmp_path, f"[ \"$1 $2\" = 'topo -m' ] && /bin/cat {FOLDER / 'rtx4090_pair.topo.txt'}")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_topology().links["GPU0"] == {"GPU1": "PHB"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('echo "NVIDIA-SMI has failed because it couldn\'t communicate with the NVIDIA driver"; exit 9', "communicate"),
        ("echo nothing to show", "printed no matrix"),
    ],
)
def test_a_failing_nvidia_smi_is_an_error_with_its_reason(tmp_path, monkeypatch, text, reason):
    program(tmp_path, text)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match=reason):
        read_topology()
