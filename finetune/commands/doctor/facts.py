"""The facts of all machines, of the ranks of a launch and of a job, and their JSON."""

import dataclasses
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from finetune.commands.doctor.subjects.gpus import GpuFacts, gather_gpus
from finetune.commands.doctor.subjects.job import JobFacts
from finetune.commands.doctor.subjects.links import read_topology
from finetune.commands.doctor.subjects.network import NetworkFacts, gather_hub, gather_network
from finetune.commands.doctor.subjects.ranks import LinkFacts, RankFacts
from finetune.commands.doctor.subjects.software import SoftwareFacts, gather_software
from finetune.commands.doctor.subjects.storage import StorageFacts, gather_storage
from finetune.commands.doctor.subjects.system import SystemFacts, gather_system
from finetune.commands.doctor.subjects.tools import gather_all
from finetune.commands.doctor.subjects.variables import gather_variables
from finetune.errors import UserError
from finetune.runtime.files.read import first_problem, read_json


@dataclass(frozen=True)
class HostFacts:
    """One machine; missing facts are None or empty."""

    hostname: str
    system: SystemFacts = field(default_factory=SystemFacts)
    gpus: GpuFacts = field(default_factory=GpuFacts)
    network: NetworkFacts = field(default_factory=NetworkFacts)
    storage: StorageFacts = field(default_factory=StorageFacts)
    software: SoftwareFacts = field(default_factory=SoftwareFacts)
    variables: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()  # gatherers that failed, with the reason


@dataclass(frozen=True)
class Facts:
    """All machines and ranks of a launch; without a launch, this machine."""

    hosts: tuple[HostFacts, ...]
    ranks: tuple[RankFacts, ...] = ()
    link: LinkFacts | None = None
    job: JobFacts | None = None

    @property
    def world(self) -> int:
        """Return the number of ranks, 1 without a launch."""
        return max(1, len(self.ranks))


_FACTS: TypeAdapter[Facts] = TypeAdapter(Facts)


def facts_as_json(facts: Facts) -> dict[str, Any]:
    """Return the facts as plain JSON values."""
    return dataclasses.asdict(facts)


def read_facts(path: Path) -> Facts:
    """Return the facts that `doctor --json` printed; raises UserError for any other file."""
    try:
        content = read_json(path)
        return _FACTS.validate_python(content.get("facts", content) if isinstance(content, dict) else content)
    except ValidationError as error:
        raise UserError(f"--facts {path}: {first_problem(error)}. Give a file that `doctor --json` wrote.") from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"--facts {path}: it cannot be read ({error}). Give a file that `doctor --json` wrote."
        ) from error


SECONDS = 30.0
"""Time limit of a gatherer: a driver that hangs never answers."""


def gather_host(folders: Mapping[str, Path], *, variables: Mapping[str, str]) -> HostFacts:
    """Return the facts of this machine; a run would write to `folders`.

    `variables` is the initial environment of the process.
    """
    parts, unread = gather_all(
        {
            "system": gather_system,
            "gpus": gather_gpus,
            "network": gather_network,
            "hub": partial(gather_hub, variables),
            "storage": partial(gather_storage, folders),
            "software": gather_software,
        },
        seconds=SECONDS,
    )
    hub = parts.pop("hub", None)
    facts = HostFacts(platform.node(), variables=gather_variables(variables), **parts)
    facts = replace(facts, network=replace(facts.network, hub=hub))
    if len(facts.gpus.gpus) > 1:
        topology, late = gather_all({"topology": read_topology}, seconds=SECONDS)
        facts = replace(facts, gpus=replace(facts.gpus, **topology))
        unread += late
    return replace(facts, unread=tuple(unread))
