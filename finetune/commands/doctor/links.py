"""The connections between the GPUs of a machine: `nvidia-smi topo -m`, and the checks of NVLink, PCIe and P2P."""

import re
from collections.abc import Collection, Iterator, Mapping

from finetune.commands.doctor.findings import Finding, must_fix, note, run_tool, should_fix
from finetune.commands.doctor.gpus import GpuFacts, Topology
from finetune.commands.doctor.system import SystemFacts

_DEVICE = re.compile(r"(GPU|NIC)\d+|(mlx|bnxt|efa|irdma|rocep|ibp)\w*")

_CARD = re.compile(r"\s*(NIC\d+):\s*(\S+)")

_LINK = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS")

_CORES = re.compile(r"\d+([-,]\d+)*")


def read_topology() -> Topology:
    """Return the topology of this machine; raises OSError if `nvidia-smi` does not print it."""
    topology = parse_topology(run_tool(["nvidia-smi", "topo", "-m"]))
    if not topology.links:
        raise OSError("`nvidia-smi topo -m` printed no matrix")
    return topology


def parse_topology(text: str) -> Topology:
    """Return the matrix, without the lines above and below it; columns are separated by tabs or blanks."""
    columns: list[str] = []
    links: dict[str, dict[str, str]] = {}
    cores: dict[str, str] = {}
    numa: dict[str, str] = {}
    cards: dict[str, str] = {}
    for line in text.splitlines():
        words = line.split()
        card = _CARD.fullmatch(line)
        if card is not None:
            cards[card[1]] = card[2]
        elif not columns:
            columns = [word for word in words if _DEVICE.fullmatch(word)]
        elif words and words[0] in columns:
            name, row = words[0], words[1:]
            count = next((number for number, word in enumerate(row) if not _LINK.fullmatch(word)), len(row))
            links[name] = {other: link for other, link in zip(columns, row[:count], strict=False) if link != "X"}
            affinity = [word for word in row[count:] if word != "N/A"]
            if name.startswith("GPU") and affinity and _CORES.fullmatch(affinity[0]):
                cores[name] = affinity[0]
                numa |= {name: affinity[1]} if len(affinity) > 1 and _CORES.fullmatch(affinity[1]) else {}
    return Topology(links, cores, numa, cards)


P2P_OFF = "export NCCL_P2P_DISABLE=1"

_ADA = re.compile(r"RTX 40\d\d")

_ADA_DRIVER = (550, 40, 7)
"""The first driver that reports that the RTX 40 series has no P2P (accelerate: `check_cuda_p2p_ib_support`)."""

_PCIE = ("PIX", "PXB", "PHB", "NODE")


def check_links(
    gpus: GpuFacts, system: SystemFacts, variables: Mapping[str, str], *, has_infiniband: bool
) -> Iterator[Finding]:
    """Yield the problems of the links between the GPUs of a machine."""
    if len(gpus.gpus) < 2:
        return
    links = pair_links(gpus.topology)
    has_nvlink = any(link.startswith("NV") for link in links.values())
    is_off = variables.get("NCCL_P2P_DISABLE") == "1"
    if is_off and has_nvlink:
        yield should_fix(
            "p2p-off",
            "NCCL_P2P_DISABLE=1 is set, and the GPUs have NVLink",
            why="NCCL then copies through host memory, many times slower",
            fix="unset NCCL_P2P_DISABLE",
        )
    elif not is_off:
        yield from _peer_to_peer(gpus, system, links)
    if gpus.topology is not None:
        if has_infiniband:
            cards = [name for name in next(iter(gpus.topology.links.values()), {}) if not name.startswith("GPU")]
            far = [
                name
                for name, row in gpus.topology.links.items()
                if name.startswith("GPU") and cards and all(row.get(card) == "SYS" for card in cards)
            ]
            if far:
                yield note(
                    "gpu-far-from-network",
                    f"{', '.join(far)} have no network card on their own socket",
                    why="their traffic to other machines crosses the link between the processors",
                    fix="NCCL_CROSS_NIC=1 lets rings use different cards; on a rented machine ask for one card per "
                    "socket",
                )
        nodes = set(gpus.topology.numa.values())
        if len(nodes) > 1 and variables.get("ACCELERATE_CPU_AFFINITY", "0").lower() not in ("1", "true"):
            yield note(
                "numa-affinity",
                f"the GPUs are on {len(nodes)} NUMA nodes",
                why="a rank whose process runs on the other node copies to its GPU across the sockets",
                fix="accelerate launch --enable_cpu_affinity ...",
            )


def pair_links(topology: Topology | None) -> Mapping[str, str]:
    """Return the link of each pair of GPUs: {"0-1": "NV18"}."""
    links = topology.links if topology is not None else {}
    gpus = [name for name in links if name.startswith("GPU")]
    return {
        f"{one[3:]}-{other[3:]}": links[one].get(other, "")
        for number, one in enumerate(gpus)
        for other in gpus[number + 1 :]
    }


def _peer_to_peer(gpus: GpuFacts, system: SystemFacts, links: Mapping[str, str]) -> Iterator[Finding]:
    status = gpus.p2p
    driver = tuple(int(part) for part in re.findall(r"\d+", gpus.driver or ""))
    if any(_ADA.search(gpu.name) for gpu in gpus.gpus) and driver and driver < _ADA_DRIVER:
        yield must_fix(
            "no-p2p",
            f"RTX 40 cards have no P2P, but the driver {gpus.driver} reports that they do",
            why="NCCL hangs or returns wrong sums; `accelerate launch` sets both variables itself, torchrun does not",
            fix=f"{P2P_OFF} NCCL_IB_DISABLE=1, or install driver 550.40.07 or newer",
        )
        return
    refused = {pair: reason for pair, reason in status.items() if reason != "ok"}
    if refused:
        yield note(
            "no-p2p",
            f"GPUs {_format_pairs(refused)} have no P2P: {', '.join(sorted(set(refused.values())))}",
            why="NCCL copies through /dev/shm and host memory, over PCIe twice: reducing large gradients is slow",
            fix=f"{P2P_OFF}, so that NCCL does not try it; reduce communication: gradient accumulation, LoRA",
        )
    allowed = {pair: link for pair, link in links.items() if status.get(pair, "ok") == "ok"}
    crossing = {pair for pair, link in allowed.items() if link == "SYS"}
    if crossing:
        yield should_fix(
            "p2p-across-sockets",
            f"GPUs {_format_pairs(crossing)} are connected by SYS: over PCIe and the link between the processors",
            why="P2P over that link is slower than copies through host memory; in a virtual machine or with an IOMMU "
            "NCCL may hang in its first all-reduce",
            fix=f"{P2P_OFF}   # keep it if `accelerate launch ... -m finetune doctor` is faster with it",
        )
    others = {pair for pair, link in allowed.items() if link in _PCIE}
    if others and system.iommu == "translated" and not system.is_virtual:
        yield should_fix(
            "p2p-iommu",
            f"GPUs {_format_pairs(others)} reach each other over PCIe, and the IOMMU translates addresses",
            why="the chipset may redirect or drop P2P copies: NCCL hangs, or sums are wrong without an error",
            fix=f"{P2P_OFF}; or boot with iommu=pt (intel_iommu=off) and disable ACS in the BIOS",
        )
    elif across_bridge := {pair for pair in others if allowed[pair] in ("PHB", "NODE")}:
        yield note(
            "p2p-host-bridge",
            f"GPUs {_format_pairs(across_bridge)} are connected through the processor's PCIe host bridge (PHB, NODE)",
            why="NCCL decides by platform whether to use P2P there; on some boards it hangs or is slow",
            fix=f"compare `accelerate launch ... -m finetune doctor` with and without `{P2P_OFF}`",
        )


def _format_pairs(pairs: Collection[str]) -> str:
    names = sorted(pairs)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more pairs" if len(names) > 4 else "")
