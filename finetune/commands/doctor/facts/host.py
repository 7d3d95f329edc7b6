"""What is known of one machine. Everything that a machine may lack is None or empty."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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
