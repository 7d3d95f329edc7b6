"""The state of each GPU: errors, power, heat, bus, and who else uses it."""

from collections.abc import Iterator

from finetune.commands.doctor.checks.findings import Finding, must_fix, note, should_fix
from finetune.commands.doctor.facts.host import Gpu, HostFacts
from finetune.commands.doctor.facts.launch import Facts
from finetune.runtime.resources import format_size

BUSY_SHARE = 0.05
"""Of the memory: more is in use than drivers and a desktop take."""

_CAPPED = 0.97  # of the default power
_NEAR_SLOWDOWN_CELSIUS = 5
_BF16_CAPABILITY = (8, 0)
_WORKING = 0.5  # of the power limit: such a GPU has not lowered its bus to save power
_SLOWING = ("hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "hardware power brake")


def check_gpus(host: HostFacts, facts: Facts) -> Iterator[Finding]:
    """Yield what is wrong with single GPUs, and where they differ."""
    gpus = host.gpus.gpus
    for gpu in gpus:
        yield from _memory_errors(gpu)
        yield from _power_and_heat(gpu)
        yield from _bus_generation(gpu)
        yield from _other_use(gpu, is_wsl=host.system.is_wsl)
        yield from _modes(gpu, num_ranks=sum(rank.hostname == host.hostname for rank in facts.ranks))
    yield from _bus_width(gpus)
    names = sorted({gpu.name for gpu in gpus})
    if len(names) > 1:
        yield should_fix(
            "mixed-gpus",
            f"the GPUs differ: {', '.join(names)}",
            why="each step waits for the slowest, and the smallest memory bounds the microbatch of all",
            fix="export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=... with the GPUs of one kind",
        )
    if not host.system.is_wsl and (off := [str(gpu.index) for gpu in gpus if gpu.persistence is False]):
        yield note(
            "persistence",
            f"persistence mode is off (GPU {', '.join(off)})",
            why="the driver is unloaded between processes: each start takes seconds longer, and settings are lost",
            fix="sudo nvidia-smi -pm 1",
        )
    old = [gpu for gpu in gpus if gpu.capability is not None and gpu.capability < _BF16_CAPABILITY]
    if old:
        yield note(
            "no-bf16",
            f"GPU {old[0].index} ({old[0].name}) has no bf16 units",
            why="bf16 is emulated there, slower than fp32",
            fix="train.precision: fp16",
        )


def _memory_errors(gpu: Gpu) -> Iterator[Finding]:
    if gpu.remap_failed:
        yield must_fix(
            "ecc",
            f"GPU {gpu.index} has damaged memory that can no longer be replaced",
            why="runs on it end with CUDA error `uncorrectable ECC error`",
            fix=f"leave it out (CUDA_VISIBLE_DEVICES) and have it exchanged; `nvidia-smi -q -d ECC -i {gpu.index}`",
        )
    elif gpu.uncorrected_errors or gpu.remap_pending:
        yield should_fix(
            "ecc",
            f"GPU {gpu.index} has had {gpu.uncorrected_errors or 0} uncorrectable memory errors since the driver was "
            f"loaded{', and damaged rows wait to be replaced' if gpu.remap_pending else ''}",
            why="a run that meets another one ends with a CUDA error",
            fix=f"sudo nvidia-smi --gpu-reset -i {gpu.index}   # while nothing runs on it",
        )


def _power_and_heat(gpu: Gpu) -> Iterator[Finding]:
    limit, default = gpu.power_limit_watts, gpu.power_default_watts
    if limit is not None and default is not None and limit < _CAPPED * default and "Laptop" not in gpu.name:
        yield should_fix(
            "power-cap",
            f"GPU {gpu.index} may draw {limit:.0f} W, its default is {default:.0f} W",
            why="it lowers its clocks under load, and the other ranks wait for it",
            fix=f"sudo nvidia-smi -i {gpu.index} -pl {default:.0f}",
        )
    slowed = [reason for reason in gpu.throttle_reasons if reason in _SLOWING]
    hot = (gpu.temperature_celsius or 0) >= (gpu.slowdown_celsius or 1000) - _NEAR_SLOWDOWN_CELSIUS
    if slowed or hot:
        yield should_fix(
            "throttled",
            f"GPU {gpu.index} is slowed down: {', '.join(slowed) or 'heat'} (at {gpu.temperature_celsius} C, clock "
            f"{gpu.clock_mhz} of {gpu.max_clock_mhz} MHz)",
            why="each step waits for the slowest GPU",
            fix="look after fans, airflow and power cables; "
            f"`nvidia-smi -q -d PERFORMANCE,TEMPERATURE -i {gpu.index}` shows the reasons",
        )


def _bus_width(gpus: tuple[Gpu, ...]) -> Iterator[Finding]:
    narrow = [gpu for gpu in gpus if gpu.pcie_width and gpu.pcie_width < (gpu.max_pcie_width or 0)]
    for width, most in sorted({(gpu.pcie_width, gpu.max_pcie_width) for gpu in narrow}):
        alike = [str(gpu.index) for gpu in narrow if (gpu.pcie_width, gpu.max_pcie_width) == (width, most)]
        yield should_fix(
            "pcie-width",
            f"GPU {', '.join(alike)}: {width} of {most} PCIe lanes are connected",
            why="copies to and from the GPU are that much slower; offloading suffers most",
            fix="put the card into a slot with all lanes, seat it anew; look at the riser and the BIOS's bifurcation",
        )


def _bus_generation(gpu: Gpu) -> Iterator[Finding]:
    is_working = gpu.power_watts and gpu.power_limit_watts and gpu.power_watts > _WORKING * gpu.power_limit_watts
    if is_working and (gpu.pcie_generation or 0) < (gpu.max_pcie_generation or 0):
        yield should_fix(
            "pcie-generation",
            f"GPU {gpu.index} runs PCIe {gpu.pcie_generation} under load, {gpu.max_pcie_generation} is possible",
            why="each generation halves the speed of copies",
            fix="set the slot's link speed to Auto or the highest generation in the BIOS; look at the riser",
        )


def _other_use(gpu: Gpu, *, is_wsl: bool) -> Iterator[Finding]:
    if gpu.memory_used_bytes <= BUSY_SHARE * gpu.memory_bytes:
        return
    users = ", ".join(f"{each.name} (pid {each.pid})" for each in gpu.processes[:4])
    pids = " ".join(str(each.pid) for each in gpu.processes)
    outside = "close programs in Windows" if is_wsl else "outside the container, end it"
    unnamed = f"`nvidia-smi` names what uses it: {outside}"
    yield should_fix(
        "gpu-in-use",
        f"{format_size(gpu.memory_used_bytes)} of {format_size(gpu.memory_bytes)} of GPU {gpu.index} are in use"
        f"{f' by {users}' if users else ''}",
        why="the run has that much less memory and shares the time of the GPU",
        fix=f"end them (`kill {pids}`)" if pids else unnamed,
    )


def _modes(gpu: Gpu, *, num_ranks: int) -> Iterator[Finding]:
    if gpu.compute_mode == "prohibited":
        yield must_fix(
            "compute-mode",
            f"GPU {gpu.index} refuses processes (compute mode Prohibited)",
            why="CUDA reports `all CUDA-capable devices are busy or unavailable`",
            fix=f"sudo nvidia-smi -i {gpu.index} -c DEFAULT",
        )
    if gpu.mig:
        finding = must_fix if num_ranks > 1 else note
        yield finding(
            "mig",
            f"GPU {gpu.index} is split into instances (MIG)",
            why="a process sees one instance at most, and NCCL does not connect instances",
            fix=f"run one process per instance, or `sudo nvidia-smi -i {gpu.index} -mig 0`",
        )
