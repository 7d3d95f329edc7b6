"""The matrix of `nvidia-smi topo -m`, in the forms in which drivers print it."""

import pytest

from finetune.commands.doctor.links import parse_topology, read_topology
from tests.commands.doctor.recorded import FOLDER


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
    assert topology.cores == {"GPU0": "48-63,176-191", "GPU1": "16-31,144-159"}
    assert topology.numa == {"GPU0": "3", "GPU1": "1"}


def test_network_cards_of_the_topology_are_named_by_its_legend():
    topology = parse_topology((FOLDER / "h100_nvswitch.topo.txt").read_text())
    assert topology.network_cards["NIC3"] == "mlx5_3" and len(topology.network_cards) == 8
    assert topology.links["GPU5"]["NIC5"] == "PXB" and topology.links["GPU5"]["NIC0"] == "SYS"


def test_a_topology_without_affinities_is_parsed():
    topology = parse_topology(
        "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tSYS\t\tN/A\nGPU1\tSYS\t X \t\tN/A\n"
    )
    assert topology.links == {"GPU0": {"GPU1": "SYS"}, "GPU1": {"GPU0": "SYS"}}
    assert (topology.cores, topology.numa) == ({}, {})


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
