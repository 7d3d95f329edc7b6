"""Which NCCL settings follow from the doctor's facts, and that nothing is set without a reason."""

import json
from dataclasses import asdict

import pytest

from finetune.commands.doctor.checks import Facts, HostFacts
from finetune.commands.doctor.gpus import GpuFacts
from finetune.commands.doctor.network import InfinibandPort, NetworkFacts
from finetune.commands.launch.job_files import check_job, network_variables
from tests.commands.doctor.recorded import FOLDER, host_of

SOCKETS = {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}


def made(*ports: tuple[str, str, str], interface: str | None = "eth0") -> HostFacts:
    found = tuple(InfinibandPort(device, 1, state, link_layer=layer) for device, state, layer in ports)
    return HostFacts("host", network=NetworkFacts(default_interface=interface, infiniband=found))


IB, IB_DOWN = ("mlx5_0", "ACTIVE", "InfiniBand"), ("mlx5_1", "DOWN", "InfiniBand")
ROCE, EFA = ("mlx5_2", "ACTIVE", "Ethernet"), ("rdmap79s0", "ACTIVE", "Unspecified")


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ([made()], SOCKETS),
        ([made(interface=None)], {}),
        ([made(), made(interface="ens5")], {}),
        ([made(IB)], SOCKETS),
        ([made(ROCE)], SOCKETS),
        ([made(IB, IB_DOWN), made(IB, IB_DOWN)], SOCKETS | {"NCCL_IB_HCA": "=mlx5_0:1"}),
        ([made(IB, ROCE)], SOCKETS | {"NCCL_IB_HCA": "=mlx5_0:1"}),
        ([made(IB_DOWN)], SOCKETS | {"NCCL_IB_DISABLE": "1"}),
        ([made(IB), made(IB_DOWN)], SOCKETS | {"NCCL_IB_DISABLE": "1"}),
        ([made(IB), made()], SOCKETS | {"NCCL_IB_DISABLE": "1"}),
        ([made(EFA)], SOCKETS | {"FI_PROVIDER": "efa"}),
    ],
)
def test_two_hosts(hosts, expected):
    assert network_variables(Facts(tuple(hosts)), num_nodes=2) == expected


def test_one_host_needs_no_network():
    assert network_variables(Facts((made(IB, IB_DOWN),)), num_nodes=1) == {}


def test_gpus_that_must_not_copy_directly_do_not():
    pair = host_of("rtx4090_pair")
    assert network_variables(Facts((pair,)), num_nodes=1) == {"NCCL_P2P_DISABLE": "1"}
    assert "NCCL_P2P_DISABLE" not in network_variables(Facts((host_of("h100_nvswitch"),)), num_nodes=1)


def test_every_recorded_machine_gives_settings_of_known_names():
    names = sorted(path.stem for path in FOLDER.glob("*.json"))
    known = {*SOCKETS, "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "FI_PROVIDER"}
    for name in names:
        assert network_variables(Facts((host_of(name),)), num_nodes=2).keys() <= known
    assert len(names) >= 5


def test_options_override_the_facts_file_of_doctor(words, project):
    facts = Facts((made(IB, IB_DOWN),))
    (project / "facts.json").write_text(json.dumps({"facts": asdict(facts), "findings": []}))
    request, _ = check_job(words("ddp", doctor=project / "facts.json", env=("NCCL_IB_HCA==mlx5_9",)))
    assert request.variables()["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert request.variables()["NCCL_IB_HCA"] == "=mlx5_9"
    assert GpuFacts() == facts.hosts[0].gpus
