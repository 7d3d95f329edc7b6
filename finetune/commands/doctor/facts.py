"""The facts of all machines, ranks and a job, as `doctor --json` prints them and `--facts` reads them."""

import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from finetune.commands.doctor.gpus import GpuFacts, gather_gpus, read_links
from finetune.commands.doctor.job_facts import JobFacts
from finetune.commands.doctor.network import HubFacts, NetworkFacts, gather_hub, gather_network
from finetune.commands.doctor.ranks import LinkFacts, RankFacts
from finetune.commands.doctor.system import (
    Disk,
    SoftwareFacts,
    SystemFacts,
    gather_software,
    gather_system,
    gather_variables,
)
from finetune.config.load import LoadedConfig
from finetune.data.token_cache.cache import DEFAULT_FOLDER, cache_folder
from finetune.errors import UserError
from finetune.runtime.files.read import first_problem, read_json
from finetune.runtime.resources import free_bytes


@dataclass(frozen=True)
class HostFacts:
    """One machine; missing facts are None or empty."""

    hostname: str
    system: SystemFacts = field(default_factory=SystemFacts)
    gpus: GpuFacts = field(default_factory=GpuFacts)
    network: NetworkFacts = field(default_factory=NetworkFacts)
    hub: HubFacts | None = None
    disks: tuple[Disk, ...] = ()
    software: SoftwareFacts = field(default_factory=SoftwareFacts)
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """All machines and ranks of a launch; without a launch, this machine."""

    hosts: tuple[HostFacts, ...]
    ranks: tuple[RankFacts, ...] = ()
    link: LinkFacts | None = None
    job: JobFacts = field(default_factory=JobFacts)

    @property
    def world(self) -> int:
        """Return the number of ranks, 1 without a launch."""
        return max(1, len(self.ranks))


_FACTS: TypeAdapter[Facts] = TypeAdapter(Facts)


def read_facts(path: Path) -> Facts:
    """Return the facts that `doctor --json` printed; raises UserError for any other file."""
    try:
        content = read_json(path)
        return _FACTS.validate_python(content.get("facts", content) if isinstance(content, dict) else content)
    except (OSError, ValueError) as error:
        reason = first_problem(error) if isinstance(error, ValidationError) else f"it cannot be read ({error})"
        raise UserError(f"--facts {path}: {reason}. Give a file that `doctor --json` wrote.") from error


def gather_host(loaded: LoadedConfig | None, variables: Mapping[str, str]) -> HostFacts:
    """Return the facts of this machine, with the disks of the folders to which a run of the job would write.

    `variables` is the initial environment of the process.
    """
    cache = cache_folder(loaded.config.data) if loaded is not None else Path(DEFAULT_FOLDER).expanduser()
    run = Path(loaded.config.run.folder) if loaded is not None else Path.cwd()
    folders = {"run.folder": run, "data.cache_folder": cache}
    gpus = gather_gpus()
    if len(gpus.gpus) > 1:
        with suppress(OSError):
            gpus = replace(gpus, links=read_links())
    return HostFacts(
        hostname=platform.node(),
        system=gather_system(),
        gpus=gpus,
        network=gather_network(),
        hub=gather_hub(variables),
        disks=tuple(Disk(key, str(folder), free_bytes(folder)) for key, folder in folders.items()),
        software=gather_software(),
        variables=gather_variables(variables),
    )
