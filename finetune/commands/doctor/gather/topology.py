"""How GPUs and network cards are connected, from the text of `nvidia-smi topo -m`."""

import re

from finetune.commands.doctor.facts.host import Topology
from finetune.commands.doctor.gather.tools import run_tool

_DEVICE = re.compile(r"(GPU|NIC)\d+|(mlx|bnxt|efa|irdma|rocep|ibp)\w*")
_CARD = re.compile(r"\s*(NIC\d+):\s*(\S+)")
_LINK = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS")
_CORES = re.compile(r"\d+([-,]\d+)*")


def read_topology() -> Topology:
    """Return the topology of this machine; raises OSError where `nvidia-smi` does not tell it."""
    topology = parse_topology(run_tool(["nvidia-smi", "topo", "-m"]))
    if not topology.links:
        raise OSError("`nvidia-smi topo -m` printed no matrix")
    return topology


def parse_topology(text: str) -> Topology:
    """Return the matrix, whatever is above and below it; columns are separated by tabs or blanks."""
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
