"""The facts of all machines, ranks and a job, as `doctor --json` prints them."""

import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from huggingface_hub import constants

from finetune.commands.doctor.gpus import GpuFacts, gather_gpus, read_links
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
from finetune.config.run_config import RunConfig
from finetune.data.token_cache.cache import DEFAULT_FOLDER, cache_folder
from finetune.model.loading.hub import is_local_path
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
class HubName:
    """A model, tokenizer or dataset of the job that comes from the hub."""

    key: str
    name: str
    kind: str  # "model" or "dataset"
    is_cached: bool

    def __str__(self) -> str:
        return f"{self.key}: {self.name}"


@dataclass(frozen=True)
class Facts:
    """All machines and ranks of a launch; without a launch, this machine."""

    hosts: tuple[HostFacts, ...]
    ranks: tuple[RankFacts, ...] = ()
    link: LinkFacts | None = None
    job: tuple[HubName, ...] = ()

    @property
    def world(self) -> int:
        """Return the number of ranks, 1 without a launch."""
        return max(1, len(self.ranks))


def gather_names(config: RunConfig) -> tuple[HubName, ...]:
    """Return what the job loads from the hub."""
    model, data = config.model, config.data
    models = {"model.name": model.name, "model.tokenizer.name": getattr(model.tokenizer, "name", None)}
    datasets = {"data.train.name": data.train.name, "data.validation.name": getattr(data.validation, "name", None)}
    datasets |= {f"data.train.mix.{number}.name": source.name for number, source in enumerate(data.train.mix)}
    return tuple(
        HubName(key, name, kind, _is_cached(kind, name))
        for kind, sources in (("model", models), ("dataset", datasets))
        for key, name in sources.items()
        if name is not None and not is_local_path(name)
    )


def _is_cached(kind: str, name: str) -> bool:
    folder = Path(constants.HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}", "snapshots")
    return folder.is_dir() and any(folder.iterdir())


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
