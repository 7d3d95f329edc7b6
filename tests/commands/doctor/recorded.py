"""Recorded machines, and changes to them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from finetune.commands.doctor.checks import check_facts
from finetune.commands.doctor.facts import Facts, HostFacts
from finetune.commands.doctor.findings import Finding
from finetune.commands.doctor.ranks import RankFacts

FOLDER = Path(__file__).parent / "machines"
NAMES = ("h100_nvswitch", "a10_two_sockets", "laptop_4060", "cpu_node")


def host_of(name: str, **changes: Any) -> HostFacts:
    """Return a recorded machine; `gpus={"driver": "..."}` changes a part of it, anything else replaces it."""
    printed = json.loads((FOLDER / f"{name}.json").read_text())
    (host,) = TypeAdapter(Facts).validate_python(printed["facts"]).hosts
    parts = {
        key: replace(getattr(host, key), **value) if isinstance(value, dict) and key != "variables" else value
        for key, value in changes.items()
    }
    return replace(host, **parts)


def findings_of(*hosts: HostFacts, **facts: Any) -> dict[str, Finding]:
    """Return the findings by key."""
    return {finding.key: finding for finding in check_facts(Facts(hosts, **facts))}


def ranks_of(*hosts: str) -> tuple[RankFacts, ...]:
    """Return a rank for each name of a machine."""
    return tuple(
        RankFacts(number, host, hosts[:number].count(host), versions={"torch": "2.13.0", "NCCL": "2.27.5"})
        for number, host in enumerate(hosts)
    )
