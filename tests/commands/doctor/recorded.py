"""Recorded machines, and what is changed about them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune.commands.doctor.checks.check import check_facts
from finetune.commands.doctor.checks.findings import Finding
from finetune.commands.doctor.facts.host import HostFacts
from finetune.commands.doctor.facts.launch import Facts, RankFacts, read_facts

FOLDER = Path(__file__).parent / "machines"
NAMES = ("h100_nvswitch", "a10_two_sockets", "rtx4090_pair", "wsl2", "laptop_4060", "cpu_node")


def host_of(name: str, **changes: Any) -> HostFacts:
    """Return a recorded machine; `gpus={"driver": "..."}` changes a part of it, anything else replaces it."""
    (host,) = read_facts(FOLDER / f"{name}.json").hosts
    parts = {
        key: replace(getattr(host, key), **value) if isinstance(value, dict) and key != "variables" else value
        for key, value in changes.items()
    }
    return replace(host, **parts)


def found(*hosts: HostFacts, **facts: Any) -> dict[str, Finding]:
    """Return what is found, by key; of several findings with one key the most severe."""
    findings: dict[str, Finding] = {}
    for each in check_facts(Facts(hosts, **facts)):
        findings.setdefault(each.key, each)
    return findings


def ranks_of(*hosts: str, **values: Any) -> tuple[RankFacts, ...]:
    """Return a rank for each name of a machine."""
    own: dict[str, int] = {}
    ranks = []
    for number, host in enumerate(hosts):
        own[host] = own.get(host, -1) + 1
        ranks.append(RankFacts(number, host, own[host], packages={"torch": "2.13.0"}, python="3.11.7", **values))
    return tuple(ranks)
