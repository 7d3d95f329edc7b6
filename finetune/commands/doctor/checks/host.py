"""Memory, cores, limits and the kind of a machine: container, WSL, laptop."""

from collections.abc import Iterator

from finetune.commands.doctor.checks.findings import Finding, must_fix, note, should_fix
from finetune.commands.doctor.facts.host import HostFacts, SystemFacts
from finetune.commands.doctor.facts.launch import Facts
from finetune.runtime.resources import files_needed, format_size

MANY_PROCESSES = 1000
_CORES_PER_RANK = 2


def check_host(host: HostFacts, facts: Facts) -> Iterator[Finding]:
    """Yield what limits the processes of a run on a machine."""
    ranks = num_local_ranks(host, facts)
    yield from _memory(host.system, facts, ranks=ranks)
    yield from _cores(host, ranks=ranks)
    yield from _files(host.system, world=facts.world)
    yield from _power(host.system, has_gpu=bool(host.gpus.gpus))
    if host.system.is_wsl:
        yield from _wsl(host)


def num_local_ranks(host: HostFacts, facts: Facts) -> int:
    """Return the ranks on a machine: those that were launched, else one for each GPU."""
    launched = sum(rank.hostname == host.hostname for rank in facts.ranks)
    return max(1, launched or len(host.gpus.gpus))


def _memory(system: SystemFacts, facts: Facts, *, ranks: int) -> Iterator[Finding]:
    limit, job = system.memory_limit_bytes, facts.job
    if limit is not None:
        yield note(
            "memory-limit",
            f"the container may use {format_size(limit)} of the {format_size(system.memory_bytes)} of the machine",
            why="the kernel kills a process that asks for more (exit code 137), whatever `free` shows",
            fix="docker: --memory; Kubernetes: resources.limits.memory; Slurm: --mem",
        )
    available = min(limit or system.memory_bytes, system.memory_bytes)
    needed = 0 if job is None else job.num_parameters * 4 * ranks
    if available and needed > available:
        yield should_fix(
            "memory-loading",
            f"{ranks} ranks that each load {job.num_parameters if job else 0:,} parameters in float32 take "
            f"{format_size(needed)} of host memory, and there are {format_size(available)}",
            why="the run is killed while it loads the model",
            fix="launch FSDP2 with fsdp_cpu_ram_efficient_loading: true, or ZeRO-3: both load on rank 0 or in parts",
        )


def _cores(host: HostFacts, *, ranks: int) -> Iterator[Finding]:
    system, threads = host.system, host.variables.get("OMP_NUM_THREADS", "")
    share = system.usable_cores // ranks
    if host.gpus.gpus and share < _CORES_PER_RANK:
        yield should_fix(
            "cores-per-rank",
            f"{system.usable_cores} cores may be used by {ranks} ranks",
            why="each rank has a thread that feeds its GPU and loads data beside it",
            fix="ask for more (docker: --cpus; Slurm: --cpus-per-task), and write data.num_workers: 0",
        )
    if threads.isdigit() and int(threads) > max(1, share):
        yield should_fix(
            "too-many-threads",
            f"OMP_NUM_THREADS={threads}, and a rank has {max(1, share)} cores ({system.usable_cores} for {ranks})",
            why="threads that share a core wait for each other: work on the CPU takes several times as long",
            fix=f"export OMP_NUM_THREADS={max(1, share)}",
        )
    elif threads == "1" and not host.gpus.gpus and share > 1:
        yield note(
            "too-few-threads",
            f"OMP_NUM_THREADS=1, and each rank has {share} cores",
            why="torchrun sets it to 1 for several processes; training on the CPU then uses one core",
            fix=f"export OMP_NUM_THREADS={share}",
        )


def _files(system: SystemFacts, *, world: int) -> Iterator[Finding]:
    needed, is_enough = files_needed(world), system.files_hard >= files_needed(world)
    if is_enough and system.files_hard >= files_needed(MANY_PROCESSES):
        return
    processes = MANY_PROCESSES if is_enough else world
    finding = note if is_enough else must_fix
    needed = files_needed(processes)
    yield finding(
        "open-files",
        f"a process may have {system.files_hard:,} files and sockets open (`ulimit -Hn`), and a run of {processes:,} "
        f"processes needs {needed:,}",
        why="connections to other ranks are refused: `Too many open files`",
        fix=f"raise the hard limit (docker: --ulimit nofile={needed}; Slurm: PropagateResourceLimits; else "
        "/etc/security/limits.conf)",
    )


def _power(system: SystemFacts, *, has_gpu: bool) -> Iterator[Finding]:
    if system.has_battery and system.is_plugged_in is False:
        yield should_fix(
            "on-battery",
            "the machine runs on battery",
            why="processor and GPU run at a fraction of their speed, and the run ends with the charge",
            fix="plug it in, and set the power mode to performance (`powerprofilesctl set performance`)",
        )
    elif system.has_battery and has_gpu:
        yield note(
            "laptop",
            "this is a laptop",
            why="its GPU has less power than the card of that name and slows down with heat; suspend ends a run",
            fix="systemd-inhibit python -m finetune --config job.yaml   # and save often: checkpoint.every_steps",
        )
    if system.governor == "powersave" and not system.is_wsl and not system.has_battery:
        yield note(
            "governor",
            "the cores' frequency governor is powersave",
            why="on some processors they stay at a low clock, and the GPU waits for its kernels to be launched",
            fix="sudo cpupower frequency-set -g performance",
        )


def _wsl(host: HostFacts) -> Iterator[Finding]:
    yield note(
        "wsl",
        "this is WSL2",
        why="the GPU is shared with Windows' desktop; pinned memory is limited, there is neither NVLink nor P2P, and "
        "Linux has half of the memory unless told otherwise",
        fix="data.pin_memory: false where pinning fails; memory= and swap= in %UserProfile%\\.wslconfig; "
        "export LD_LIBRARY_PATH=/usr/lib/wsl/lib where libcuda is not found, and install no Linux driver",
    )
    if len(host.gpus.gpus) > 1 and host.variables.get("NCCL_P2P_DISABLE") != "1":
        yield should_fix(
            "wsl-p2p",
            f"WSL2 with {len(host.gpus.gpus)} GPUs",
            why="there is no P2P under WSL2, and NCCL may hang when it tries",
            fix="export NCCL_P2P_DISABLE=1",
        )
