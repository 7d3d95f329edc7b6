"""GPUs of a machine and their links: facts by NVML (without a CUDA context) and `nvidia-smi topo -m`, and checks."""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil

from finetune.commands.doctor.findings import Finding, Severity, finding, run_tool
from finetune.commands.doctor.system import SystemFacts
from finetune.runtime.optional import lazily

with lazily():
    import pynvml


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
    ecc: bool | None = None
    uncorrected_errors: int | None = None  # since the driver was loaded
    remap_pending: bool = False  # damaged rows of memory that a reset would remap
    remap_failed: bool = False
    power_watts: float | None = None
    power_limit_watts: float | None = None
    power_default_watts: float | None = None
    clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    throttle_reasons: tuple[str, ...] = ()
    temperature_celsius: int | None = None
    slowdown_celsius: int | None = None
    pcie_generation: int | None = None  # the current one: an idle GPU lowers it
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
    numa: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GpuFacts:
    """The GPUs of a machine, their driver and how they are connected."""

    has_driver: bool = False
    driver: str | None = None
    driver_cuda: str | None = None  # the newest CUDA that the driver runs
    gpus: tuple[Gpu, ...] = ()
    topology: Topology | None = None
    p2p: Mapping[str, str] = field(default_factory=dict)  # {"0-1": "ok"}
    problem: str | None = None  # the reason why NVML does not answer


DRIVER_MARKS = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))  # dxg: under WSL
_THROTTLE_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}

_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
_P2P = {0: "ok", 1: "chipset not supported", 2: "GPU not supported", 3: "topology not supported", 4: "disabled"}


def gather_gpus() -> GpuFacts:
    """Return the GPUs; a machine without a driver has none, and one whose driver does not answer has a `problem`."""
    has_driver = any(mark.exists() for mark in DRIVER_MARKS)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return GpuFacts(has_driver=has_driver, problem=str(error) if has_driver else None)
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        cuda = _query(pynvml.nvmlSystemGetCudaDriverVersion_v2)
        p2p = {}
        for (first, one), (second, other) in combinations(enumerate(handles), 2):
            status = _query(pynvml.nvmlDeviceGetP2PStatus, one, other, pynvml.NVML_P2P_CAPS_INDEX_READ)
            if status is not None:
                p2p[f"{first}-{second}"] = _P2P.get(int(status), "unknown")
        return GpuFacts(
            has_driver=True,
            driver=_query(pynvml.nvmlSystemGetDriverVersion),
            driver_cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
            gpus=tuple(_gather_gpu(index, handle) for index, handle in enumerate(handles)),
            p2p=p2p,
        )
    finally:
        pynvml.nvmlShutdown()


def _query(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return NVML's answer; None if this GPU or driver does not support the query."""
    try:
        answer = function(*arguments)
    except pynvml.NVMLError:
        return None
    return answer.decode() if isinstance(answer, bytes) else answer


def _gather_gpu(index: int, handle: Any) -> Gpu:
    memory = _query(pynvml.nvmlDeviceGetMemoryInfo, handle)
    capability = _query(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    ecc_counter = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    remapped = _query(pynvml.nvmlDeviceGetRemappedRows, handle) or (0, 0, 0, 0)
    reasons = _query(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    slowdown = pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    processes = []
    for process in _query(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ():
        if process.pid == os.getpid():
            continue
        try:
            process_name = psutil.Process(process.pid).name()
        except psutil.Error:  # outside this container
            process_name = "unknown"
        processes.append(GpuProcess(int(process.pid), process_name, process.usedGpuMemory))
    return Gpu(
        index=index,
        name=_query(pynvml.nvmlDeviceGetName, handle) or "unknown",
        memory_bytes=0 if memory is None else int(memory.total),
        memory_used_bytes=0 if memory is None else int(memory.used),
        capability=None if capability is None else (int(capability[0]), int(capability[1])),
        ecc=_is_on(_query(pynvml.nvmlDeviceGetEccMode, handle)),
        uncorrected_errors=_query(pynvml.nvmlDeviceGetTotalEccErrors, handle, *ecc_counter),
        remap_pending=bool(remapped[2]),
        remap_failed=bool(remapped[3]),
        power_watts=_watts(_query(pynvml.nvmlDeviceGetPowerUsage, handle)),
        power_limit_watts=_watts(_query(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
        power_default_watts=_watts(_query(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)),
        clock_mhz=_query(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        max_clock_mhz=_query(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
        throttle_reasons=tuple(text for bit, text in _THROTTLE_REASONS.items() if reasons & bit),
        temperature_celsius=_query(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        slowdown_celsius=_query(pynvml.nvmlDeviceGetTemperatureThreshold, handle, slowdown),
        pcie_generation=_query(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        max_pcie_generation=_query(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_width=_query(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        max_pcie_width=_query(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        mig=_is_on(_query(pynvml.nvmlDeviceGetMigMode, handle)) is True,
        persistence=_is_on(_query(pynvml.nvmlDeviceGetPersistenceMode, handle)),
        compute_mode=_COMPUTE_MODES.get(_query(pynvml.nvmlDeviceGetComputeMode, handle) or 0, "default"),
        processes=tuple(processes),
    )


def _is_on(mode: Any) -> bool | None:
    current = mode[0] if isinstance(mode, list | tuple) else mode
    return None if current is None else bool(current)


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


BUSY_SHARE = 0.05  # of the memory: more than drivers and a desktop need
_CAPPED = 0.97  # of the default power
_NEAR_SLOWDOWN_CELSIUS = 5
_WORKING = 0.5  # of the power limit: above it, a GPU does not lower its bus speed to save power


def check_gpus(facts: GpuFacts, *, is_wsl: bool, num_ranks: int) -> Iterator[Finding]:
    """Yield the problems of single GPUs, and differences between them; `num_ranks` were launched on this machine."""
    gpus = facts.gpus
    for gpu in gpus:
        yield from _check_condition(gpu)
        yield from _check_use(gpu, is_wsl=is_wsl, num_ranks=num_ranks)
    narrow = [gpu for gpu in gpus if gpu.pcie_width and gpu.pcie_width < (gpu.max_pcie_width or 0)]
    for width, maximum in sorted({(gpu.pcie_width, gpu.max_pcie_width) for gpu in narrow}):
        indices = [str(gpu.index) for gpu in narrow if (gpu.pcie_width, gpu.max_pcie_width) == (width, maximum)]
        yield finding("pcie-width", indices=indices, width=width, maximum=maximum)
    if len(names := sorted({gpu.name for gpu in gpus})) > 1:
        yield finding("mixed-gpus", names=names)
    if not is_wsl and (off := [str(gpu.index) for gpu in gpus if gpu.persistence is False]):
        yield finding("persistence", off=off)
    if old := [gpu for gpu in gpus if gpu.capability is not None and gpu.capability < (8, 0)]:
        yield finding("no-bf16", gpu=old[0])


def _check_condition(gpu: Gpu) -> Iterator[Finding]:
    """Yield memory errors, and the reasons for which a GPU is slower than it should be."""
    if gpu.remap_failed:
        yield finding("ecc/damaged", gpu=gpu)
    elif gpu.uncorrected_errors or gpu.remap_pending:
        yield finding(
            "ecc/errors",
            gpu=gpu,
            num_errors=gpu.uncorrected_errors or 0,
            pending=", and damaged rows wait to be remapped" if gpu.remap_pending else "",
        )
    limit, default = gpu.power_limit_watts, gpu.power_default_watts
    if limit is not None and default is not None and limit < _CAPPED * default and "Laptop" not in gpu.name:
        yield finding("power-cap", gpu=gpu, limit=limit, default=default)
    slowed = [reason for reason in gpu.throttle_reasons if reason != "power cap"]
    hot = (gpu.temperature_celsius or 0) >= (gpu.slowdown_celsius or 1000) - _NEAR_SLOWDOWN_CELSIUS
    if slowed or hot:
        yield finding("throttled", gpu=gpu, reasons=", ".join(slowed) or "heat")
    is_working = gpu.power_watts and gpu.power_limit_watts and gpu.power_watts > _WORKING * gpu.power_limit_watts
    if is_working and (gpu.pcie_generation or 0) < (gpu.max_pcie_generation or 0):
        yield finding("pcie-generation", gpu=gpu)


def _check_use(gpu: Gpu, *, is_wsl: bool, num_ranks: int) -> Iterator[Finding]:
    """Yield other processes on the GPU, and modes in which it refuses ranks."""
    if gpu.memory_used_bytes > BUSY_SHARE * gpu.memory_bytes:
        users = ", ".join(f"{process.name} (pid {process.pid})" for process in gpu.processes[:4])
        pids = " ".join(str(process.pid) for process in gpu.processes)
        outside = "close programs in Windows" if is_wsl else "outside the container, end it"
        yield finding(
            "gpu-in-use",
            gpu=gpu,
            by=f" by {users}" if users else "",
            fix=f"end them (`kill {pids}`)" if pids else f"`nvidia-smi` lists the processes that use it: {outside}",
        )
    if gpu.compute_mode == "prohibited":
        yield finding("compute-mode", gpu=gpu)
    if gpu.mig:
        severity = Severity.MUST_FIX if num_ranks > 1 else Severity.NOTE
        yield finding("mig", severity=severity, gpu=gpu)


_DEVICE = re.compile(r"(GPU|NIC)\d+|(mlx|bnxt|efa|irdma|rocep|ibp)\w*")
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
    numa: dict[str, str] = {}
    for line in text.splitlines():
        words = line.split()
        if not columns:
            columns = [word for word in words if _DEVICE.fullmatch(word)]
        elif words and words[0] in columns:
            name, row = words[0], words[1:]
            count = next((number for number, word in enumerate(row) if not _LINK.fullmatch(word)), len(row))
            links[name] = {other: link for other, link in zip(columns, row[:count], strict=False) if link != "X"}
            affinity = [word for word in row[count:] if word != "N/A"]
            if name.startswith("GPU") and len(affinity) > 1 and all(map(_CORES.fullmatch, affinity[:2])):
                numa[name] = affinity[1]
    return Topology(links, numa)


P2P_OFF = "export NCCL_P2P_DISABLE=1"
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
    is_off = variables.get("NCCL_P2P_DISABLE") == "1"
    if is_off and any(link.startswith("NV") for link in links.values()):
        yield finding("p2p-off")
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
                yield finding("gpu-far-from-network", far=far)
        nodes, is_bound = set(gpus.topology.numa.values()), variables.get("ACCELERATE_CPU_AFFINITY", "0").lower()
        if len(nodes) > 1 and is_bound not in ("1", "true"):
            yield finding("numa-affinity", num_nodes=len(nodes))


def pair_links(topology: Topology | None) -> Mapping[str, str]:
    """Return the link of each pair of GPUs: {"0-1": "NV18"}."""
    links = topology.links if topology is not None else {}
    gpus = [name for name in links if name.startswith("GPU")]
    return {f"{one[3:]}-{other[3:]}": links[one].get(other, "") for one, other in combinations(gpus, 2)}


def _peer_to_peer(gpus: GpuFacts, system: SystemFacts, links: Mapping[str, str]) -> Iterator[Finding]:
    driver = tuple(int(part) for part in re.findall(r"\d+", gpus.driver or ""))
    if any("RTX 40" in gpu.name for gpu in gpus.gpus) and driver and driver < _ADA_DRIVER:
        yield finding("no-p2p/hangs", gpus=gpus)
        return
    if refused := {pair: reason for pair, reason in gpus.p2p.items() if reason != "ok"}:
        yield finding(
            "no-p2p/refused",
            pairs=_format_pairs(refused),
            reasons=", ".join(sorted(set(refused.values()))),
        )
    allowed = {pair: link for pair, link in links.items() if gpus.p2p.get(pair, "ok") == "ok"}
    if crossing := {pair for pair, link in allowed.items() if link == "SYS"}:
        yield finding("p2p-across-sockets", pairs=_format_pairs(crossing))
    others = {pair for pair, link in allowed.items() if link in _PCIE}
    if others and system.iommu == "translated" and not system.is_virtual:
        yield finding("p2p-iommu", pairs=_format_pairs(others))
    elif across_bridge := {pair for pair in others if allowed[pair] in ("PHB", "NODE")}:
        yield finding("p2p-host-bridge", pairs=_format_pairs(across_bridge))


def _format_pairs(pairs: Collection[str]) -> str:
    names = sorted(pairs)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more pairs" if len(names) > 4 else "")
