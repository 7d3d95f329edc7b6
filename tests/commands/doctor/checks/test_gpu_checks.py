"""Drivers, the state of GPUs, and how they are connected."""

from dataclasses import replace

import pytest

from finetune.commands.doctor.checks.findings import Severity
from tests.commands.doctor.recorded import found, host_of, ranks_of

H100, A10, RTX = "h100_nvswitch", "a10_two_sockets", "rtx4090_pair"


def with_gpu(machine, index=0, **changes):
    """Return a recorded machine with one GPU changed."""
    gpus = list(host_of(machine).gpus.gpus)
    gpus[index] = replace(gpus[index], **changes)
    return host_of(machine, gpus={"gpus": tuple(gpus)})


def test_a_driver_that_does_not_answer_must_be_fixed():
    host = host_of("cpu_node", gpus={"has_driver": True, "problem": "Driver/library version mismatch"})
    finding = found(host)["driver"]
    assert finding.severity is Severity.MUST_FIX
    assert "version mismatch" in finding.what and "reboot" in finding.fix


def test_torch_for_cpus_beside_a_driver_is_named_with_the_build_that_the_driver_runs():
    finding = found(host_of(A10, software={"torch_cuda": None}))["torch-build"]
    assert finding.severity is Severity.MUST_FIX and finding.fix.endswith("whl/cu126")
    assert found(host_of(H100, software={"torch_cuda": None}))["torch-build"].fix.endswith("whl/cu128")


def test_forward_compatibility_makes_an_old_driver_do_on_data_centre_gpus_alone():
    library = "/usr/local/cuda/compat/libcuda.so.1"
    a10 = host_of(A10, software={"compatibility_library": library, "num_torch_devices": 4, "nccl": "2.27.5"})
    assert "driver-too-old" not in found(a10) and "forward-compatibility" not in found(a10)
    finding = found(host_of(RTX, software={"compatibility_library": library}))["forward-compatibility"]
    assert finding.severity is Severity.MUST_FIX and "LD_LIBRARY_PATH" in finding.fix
    newer = found(host_of(H100, software={"compatibility_library": library}))["forward-compatibility"]
    assert newer.severity is Severity.SHOULD_FIX


def test_a_gpu_that_torch_has_no_kernels_for_is_found():
    finding = found(with_gpu(RTX, capability=(12, 0)))["architecture"]
    assert finding.severity is Severity.MUST_FIX and "sm_120" in finding.what and "cu128" in finding.fix


def test_gpus_that_torch_does_not_see_are_found():
    assert "torch-sees-no-gpu" in found(host_of(H100, software={"num_torch_devices": 0}))
    assert found(host_of(H100, software={"nccl": None}))["nccl"].severity is Severity.MUST_FIX


@pytest.mark.parametrize(
    ("changes", "key", "severity", "fix"),
    [
        ({"uncorrected_errors": 3}, "ecc", Severity.SHOULD_FIX, "--gpu-reset -i 2"),
        ({"remap_failed": True}, "ecc", Severity.MUST_FIX, "exchanged"),
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
def test_what_is_wrong_with_one_gpu_is_named(changes, key, severity, fix):
    finding = found(with_gpu(H100, 2, **changes))[key]
    assert finding.severity is severity and fix in finding.fix


def test_an_idle_gpu_that_has_lowered_its_bus_is_left_alone():
    assert "pcie-generation" not in found(with_gpu(H100, pcie_generation=1, power_watts=60.0))


def test_instances_of_a_gpu_cannot_be_joined_by_nccl():
    host = with_gpu(H100, mig=True)
    assert found(host, ranks=ranks_of("dgx-01", "dgx-01"))["mig"].severity is Severity.MUST_FIX


def test_p2p_switched_off_beside_nvlink_is_a_loss():
    finding = found(host_of(H100, variables={"NCCL_P2P_DISABLE": "1"}))["p2p-off"]
    assert (finding.severity, finding.fix) == (Severity.SHOULD_FIX, "unset NCCL_P2P_DISABLE")


def test_with_the_variable_set_links_between_sockets_are_right():
    findings = found(host_of(A10, variables={"NCCL_P2P_DISABLE": "1"}))
    assert not {"p2p-off", "p2p-across-sockets", "p2p-iommu"} & findings.keys()


def test_a_driver_that_knows_of_no_p2p_on_the_rtx_4090_leaves_a_note():
    host = host_of(RTX, gpus={"driver": "570.86.10", "p2p": {"0-1": "GPU not supported"}})
    finding = found(host)["no-p2p"]
    assert finding.severity is Severity.NOTE and "gradient accumulation" in finding.fix


def test_without_a_translating_iommu_a_host_bridge_is_worth_a_measurement():
    host = host_of(RTX, gpus={"driver": "570.86.10"}, system={"iommu": "passthrough"})
    finding = found(host)["p2p-host-bridge"]
    assert finding.severity is Severity.NOTE and "NCCL_P2P_DISABLE=1" in finding.fix


def test_gpus_without_a_network_card_on_their_socket_are_noted():
    topology = host_of(H100).gpus.topology
    far = {
        name: {**row, **{card: "SYS" for card in row if card.startswith("NIC")}} for name, row in topology.links.items()
    }
    host = host_of(H100, gpus={"topology": replace(topology, links={**topology.links, "GPU7": far["GPU7"]})})
    assert found(host)["gpu-far-from-network"].what.startswith("GPU7 ")
