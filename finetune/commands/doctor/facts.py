"""What is known of the machines of a run: frozen records of plain values that can be written to JSON and sent.

`gather/` fills them in, `checks/` reads nothing else, so a recorded file is checked as the machine itself would be.
Everything that a machine may lack is None or empty. Unknown keys of a newer version are ignored.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from finetune.errors import UserError
from finetune.runtime.files.read import first_problem, read_json


@dataclass(frozen=True)
class GpuProcess:
    """A process that has memory on a GPU."""

    pid: int
    name: str
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Gpu:
    """One GPU, as NVML describes it."""

    index: int
    name: str
    memory_bytes: int
    memory_used_bytes: int = 0
    capability: tuple[int, int] | None = None
    pci_bus: str = ""
    ecc: bool | None = None
    uncorrected_errors: int | None = None  # since the driver was loaded
    remap_pending: bool = False  # damaged rows of memory that a reset would replace
    remap_failed: bool = False
    power_watts: float | None = None
    power_limit_watts: float | None = None
    power_default_watts: float | None = None
    clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    throttle_reasons: tuple[str, ...] = ()
    temperature_celsius: int | None = None
    slowdown_celsius: int | None = None
    pcie_generation: int | None = None  # of this moment: an idle GPU lowers it
    max_pcie_generation: int | None = None
    pcie_width: int | None = None
    max_pcie_width: int | None = None
    mig: bool = False
    persistence: bool | None = None
    compute_mode: str = "default"
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True)
class Topology:
    """The matrix of `nvidia-smi topo -m`."""

    links: Mapping[str, Mapping[str, str]]  # {"GPU0": {"GPU1": "NV18", "NIC0": "PIX"}}
    cores: Mapping[str, str] = field(default_factory=dict)  # {"GPU0": "0-23,96-119"}
    numa: Mapping[str, str] = field(default_factory=dict)
    network_cards: Mapping[str, str] = field(default_factory=dict)  # {"NIC0": "mlx5_0"}


@dataclass(frozen=True)
class GpuFacts:
    """The GPUs of a machine, their driver and how they are connected."""

    has_driver: bool = False
    driver: str | None = None
    driver_cuda: str | None = None  # the newest CUDA that the driver runs
    gpus: tuple[Gpu, ...] = ()
    topology: Topology | None = None
    p2p: Mapping[str, str] = field(default_factory=dict)  # {"0-1": "ok"}
    problem: str | None = None  # why NVML does not answer


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node."""

    index: int
    cores: str


@dataclass(frozen=True)
class SystemFacts:
    """Processor, memory, limits and kind of a machine."""

    platform: str = ""
    num_cores: int = 1
    usable_cores: int = 1
    local_processes: int = 1  # that the launcher has started here
    numa: tuple[NumaNode, ...] = ()
    memory_bytes: int = 0
    available_bytes: int = 0
    memory_limit_bytes: int | None = None  # of the container
    is_wsl: bool = False
    is_container: bool = False
    is_virtual: bool = False
    iommu: str | None = None  # "translated", "passthrough" or "off"
    has_battery: bool = False
    is_plugged_in: bool | None = None
    governor: str | None = None
    files_soft: int = 1 << 30
    files_hard: int = 1 << 30
    locked_memory_bytes: int | None = None  # None: unlimited


@dataclass(frozen=True)
class Interface:
    """A network interface with an IPv4 address."""

    name: str
    is_up: bool
    address: str = ""
    speed_mbps: int = 0  # 0: unknown


@dataclass(frozen=True)
class InfinibandPort:
    """A port of an InfiniBand or RoCE adapter."""

    device: str
    port: int
    state: str  # "ACTIVE", "DOWN", "INIT"
    rate: str = ""
    link_layer: str = "InfiniBand"


@dataclass(frozen=True)
class HubFacts:
    """Whether the Hugging Face hub answers."""

    endpoint: str
    is_offline_wanted: bool = False  # HF_HUB_OFFLINE
    proxy: str | None = None
    seconds: float | None = None  # until a connection was open
    problem: str | None = None


@dataclass(frozen=True)
class NetworkFacts:
    """Interfaces, InfiniBand and the way to the hub."""

    interfaces: tuple[Interface, ...] = ()
    default_interface: str | None = None
    host_address: str | None = None  # of the machine's own name
    infiniband: tuple[InfinibandPort, ...] = ()
    has_peer_memory: bool | None = None  # the module nvidia_peermem is loaded
    hub: HubFacts | None = None


@dataclass(frozen=True)
class Disk:
    """The disk of a folder that a run writes to."""

    name: str  # "run" or "cache"
    folder: str
    free_bytes: int
    filesystem: str = ""
    free_files: int | None = None
    write_bytes_per_second: float | None = None
    is_writable: bool = True


@dataclass(frozen=True)
class StorageFacts:
    """Disks and shared memory."""

    disks: tuple[Disk, ...] = ()
    shared_bytes: int | None = None
    shared_free_bytes: int | None = None


@dataclass(frozen=True)
class Lock:
    """A lock of a build of DeepSpeed's extensions."""

    path: str
    state: str
    text: str


@dataclass(frozen=True)
class SoftwareFacts:
    """Versions, and what compiles."""

    python: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    torch_cuda: str | None = None  # None: a build for CPUs
    torch_architectures: tuple[str, ...] = ()  # ("sm_80", "sm_90")
    num_torch_devices: int = 0
    nccl: str | None = None
    compatibility_library: str | None = None  # libcuda of a cuda-compat package, where it is used
    compiler: str | None = None
    nvcc: str | None = None
    has_ninja: bool = True
    missing_for_cpu_adam: str | None = None
    locks: tuple[Lock, ...] = ()
    accelerate_config: str | None = None  # the default file, where it exists
    accelerate_settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class HostFacts:
    """One machine."""

    hostname: str
    system: SystemFacts = SystemFacts()
    gpus: GpuFacts = GpuFacts()
    network: NetworkFacts = NetworkFacts()
    storage: StorageFacts = StorageFacts()
    software: SoftwareFacts = SoftwareFacts()
    variables: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()  # what could not be found out, and why


@dataclass(frozen=True)
class HubName:
    """A model, tokenizer or dataset of the job on the hub."""

    key: str
    name: str
    is_cached: bool


@dataclass(frozen=True)
class JobFacts:
    """What a job computes, reads and writes."""

    file: str
    num_parameters: int = 0
    num_trained: int = 0
    item_bytes: int = 4  # of a number in the forward pass
    gradient_bytes: int = 4  # of a number of the gradients
    global_batch_size: int = 1
    microbatch_size: int = 1
    tokens_per_step: int = 0  # at most
    checkpoint_bytes: int = 0
    num_checkpoints: int = 0  # at the same time
    final_bytes: int = 0
    cache_bytes: int = 0
    names: tuple[HubName, ...] = ()
    problem: str | None = None  # why the model could not be built


@dataclass(frozen=True)
class RankFacts:
    """One process of a launch."""

    rank: int
    hostname: str
    local_rank: int = 0
    arrived_seconds: float = 0.0  # after the first
    clock_offset_seconds: float = 0.0  # of its machine, against rank 0's
    python: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    torch_cuda: str | None = None
    nccl: str | None = None
    device: str = "cpu"
    flops_per_second: float = 0.0  # of a matrix product


@dataclass(frozen=True)
class AllReduceSpeed:
    """All-reduces of one size over all ranks."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class PairSpeed:
    """Messages between two ranks."""

    first: int
    second: int
    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class LinkFacts:
    """What was measured between the ranks."""

    backend: str
    all_reduce: tuple[AllReduceSpeed, ...]
    pairs: tuple[PairSpeed, ...] = ()


@dataclass(frozen=True)
class Facts:
    """All machines and ranks of a launch, or the one machine without a launch."""

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
    """Return the facts as plain values."""
    return dataclasses.asdict(facts)


def read_facts(path: Path) -> Facts:
    """Return the facts that `doctor --json` printed; raises UserError for a file that has none."""
    try:
        content = read_json(path)
        return _FACTS.validate_python(content.get("facts", content) if isinstance(content, dict) else content)
    except ValidationError as error:
        raise UserError(f"--facts {path}: {first_problem(error)}. Give a file that `doctor --json` wrote.") from error
    except ValueError as error:
        raise UserError(f"--facts {path}: it is not JSON ({error}). Give a file that `doctor --json` wrote.") from error
