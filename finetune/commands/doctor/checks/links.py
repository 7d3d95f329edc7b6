"""How the GPUs of a machine reach each other: NVLink, PCIe switches, or through the processors."""

import re
from collections.abc import Collection, Iterator, Mapping

from finetune.commands.doctor.checks.findings import Finding, must_fix, note, should_fix
from finetune.commands.doctor.facts.host import HostFacts, Topology
from finetune.commands.doctor.facts.launch import Facts

P2P_OFF = "export NCCL_P2P_DISABLE=1"

_ADA = re.compile(r"RTX 40\d\d")
_ADA_DRIVER = (550, 40, 7)
"""From this driver on the RTX 40 series says itself that it has no P2P (accelerate's `check_cuda_p2p_ib_support`)."""

_PCIE = ("PIX", "PXB", "PHB", "NODE")


def check_links(host: HostFacts, facts: Facts) -> Iterator[Finding]:
    """Yield what to set for the links between the GPUs of a machine."""
    if len(host.gpus.gpus) < 2:
        return
    links = pair_links(host.gpus.topology)
    has_nvlink = any(link.startswith("NV") for link in links.values())
    is_off = host.variables.get("NCCL_P2P_DISABLE") == "1"
    if is_off and has_nvlink:
        yield should_fix(
            "p2p-off",
            "NCCL_P2P_DISABLE=1 is set, and the GPUs have NVLink",
            why="NCCL then copies through host memory instead, many times slower",
            fix="unset NCCL_P2P_DISABLE",
        )
    elif not is_off:
        yield from _peer_to_peer(host, links)
    yield from _network_cards(host)
    yield from _affinity(host)


def pair_links(topology: Topology | None) -> Mapping[str, str]:
    """Return the link of each pair of GPUs: {"0-1": "NV18"}."""
    links = topology.links if topology is not None else {}
    gpus = [name for name in links if name.startswith("GPU")]
    return {
        f"{one[3:]}-{other[3:]}": links[one].get(other, "")
        for number, one in enumerate(gpus)
        for other in gpus[number + 1 :]
    }


def _peer_to_peer(host: HostFacts, links: Mapping[str, str]) -> Iterator[Finding]:
    status = host.gpus.p2p
    driver = tuple(int(part) for part in re.findall(r"\d+", host.gpus.driver or ""))
    if any(_ADA.search(gpu.name) for gpu in host.gpus.gpus) and driver and driver < _ADA_DRIVER:
        yield must_fix(
            "no-p2p",
            f"RTX 40 cards have no P2P, and the driver {host.gpus.driver} reports that they have",
            why="NCCL hangs or sums wrongly; `accelerate launch` sets the two variables itself, torchrun does not",
            fix=f"{P2P_OFF} NCCL_IB_DISABLE=1, or install driver 550.40.07 or newer",
        )
        return
    refused = {pair: each for pair, each in status.items() if each != "ok"}
    if refused:
        yield note(
            "no-p2p",
            f"GPUs {_listed(refused)} have no P2P: {', '.join(sorted(set(refused.values())))}",
            why="NCCL copies through /dev/shm and host memory, over PCIe twice: gradients of large models take long",
            fix=f"{P2P_OFF}, as NCCL then does not try; prefer few synchronisations: gradient accumulation, LoRA",
        )
    allowed = {pair: link for pair, link in links.items() if status.get(pair, "ok") == "ok"}
    yield from _through_processors(host, allowed)


def _through_processors(host: HostFacts, allowed: Mapping[str, str]) -> Iterator[Finding]:
    """Yield for pairs whose driver allows P2P, though the way is over PCIe."""
    crossing = {pair for pair, link in allowed.items() if link == "SYS"}
    if crossing:
        yield should_fix(
            "p2p-across-sockets",
            f"GPUs {_listed(crossing)} are connected by SYS: over PCIe and the link between the processors",
            why="P2P over that link is slower than copies through host memory; in a virtual machine or with an IOMMU "
            "NCCL may hang in its first all-reduce",
            fix=f"{P2P_OFF}   # keep it if `accelerate launch ... -m finetune doctor` is faster with it",
        )
    others = {pair for pair, link in allowed.items() if link in _PCIE}
    if others and host.system.iommu == "translated" and not host.system.is_virtual:
        yield should_fix(
            "p2p-iommu",
            f"GPUs {_listed(others)} reach each other over PCIe, and the IOMMU translates addresses",
            why="the chipset may redirect or drop P2P copies: NCCL hangs, or sums are wrong without an error",
            fix=f"{P2P_OFF}; or boot with iommu=pt (intel_iommu=off) and switch ACS off in the BIOS",
        )
    elif behind_bridge := {pair for pair in others if allowed[pair] in ("PHB", "NODE")}:
        yield note(
            "p2p-host-bridge",
            f"GPUs {_listed(behind_bridge)} are connected through the processor's PCIe host bridge (PHB, NODE)",
            why="NCCL decides by the platform whether P2P is used there; on some boards it hangs or is slow",
            fix=f"compare `accelerate launch ... -m finetune doctor` with and without `{P2P_OFF}`",
        )


def _network_cards(host: HostFacts) -> Iterator[Finding]:
    topology = host.gpus.topology
    active = any(port.state == "ACTIVE" for port in host.network.infiniband)
    if topology is None or not active:
        return
    cards = [name for name in next(iter(topology.links.values()), {}) if not name.startswith("GPU")]
    far = [
        name
        for name, row in topology.links.items()
        if name.startswith("GPU") and cards and all(row.get(card) == "SYS" for card in cards)
    ]
    if far:
        yield note(
            "gpu-far-from-network",
            f"{', '.join(far)} have no network card on their own socket",
            why="their traffic to other machines crosses the link between the processors",
            fix="NCCL_CROSS_NIC=1 lets rings change cards; on a rented machine ask for one card per socket",
        )


def _affinity(host: HostFacts) -> Iterator[Finding]:
    topology = host.gpus.topology
    nodes = set(topology.numa.values()) if topology is not None else set()
    if len(nodes) > 1 and host.variables.get("ACCELERATE_CPU_AFFINITY", "0").lower() not in ("1", "true"):
        yield note(
            "numa-affinity",
            f"the GPUs are on {len(nodes)} NUMA nodes",
            why="a rank whose process runs on the other node copies to its GPU across the sockets",
            fix="accelerate launch --enable_cpu_affinity ...",
        )


def _listed(pairs: Collection[str]) -> str:
    found = sorted(pairs)
    return ", ".join(found[:4]) + (f" and {len(found) - 4} more pairs" if len(found) > 4 else "")
