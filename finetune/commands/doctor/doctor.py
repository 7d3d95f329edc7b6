"""`finetune doctor`: facts of a run's machines, measurements between its ranks, and problems to fix first."""

import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from finetune.commands.doctor import job_facts, ranks
from finetune.commands.doctor.checks import (
    NOMINAL,
    Facts,
    HostFacts,
    check_facts,
    compute_seconds,
    gather_host,
    read_facts,
    strategy_costs,
)
from finetune.commands.doctor.findings import has_severe
from finetune.commands.doctor.gpus import pair_links
from finetune.commands.doctor.ranks import LinkFacts
from finetune.commands.printing import number_table, print_facts, print_json, print_table
from finetune.config.load import LoadedConfig, load_config, with_local_folder
from finetune.errors import LostContact, UserError
from finetune.runtime import distributed
from finetune.runtime.processes import exit_process
from finetune.runtime.resources import format_size
from finetune.runtime.text.terminal import printable, quiet_libraries

WAIT_SECONDS = 60.0

_MEASURE_SECONDS = 180.0
"""Time limit of all measurements between ranks, after which they count as hanging."""

_HANG_FIX = (
    "    fix: export NCCL_P2P_DISABLE=1 (GPUs of one machine), or NCCL_SOCKET_IFNAME=eth0 with the interface of the\n"
    "         machines' network; NCCL_DEBUG=INFO shows the transport that NCCL chooses"
)


def examine(
    path: Path | None,
    overrides: Sequence[str],
    *,
    recorded: Path | None = None,
    as_json: bool = False,
    wait_seconds: float = WAIT_SECONDS,
) -> int:
    """Print facts and findings, and return 1 where something must be fixed before a run, else 0.

    With a job, its folders, models and datasets are also checked. `recorded` facts are checked instead of this machine.
    With several processes, the facts include measurements between them, and rank 0 prints. Raises ConfigError for a
    mistake in the job, and LostContact when a rank does not arrive. Collective.
    """
    if recorded is not None:
        return _report(read_facts(recorded), None, as_json=as_json)
    loaded = with_local_folder(load_config(path, overrides)) if path else None
    variables = dict(os.environ)  # libraries set some when they are imported
    quiet_libraries(is_main=distributed.is_main())
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return _report(Facts((gather_host(loaded, variables),)), loaded, as_json=as_json)
    waited = rendezvous(os.environ, seconds=wait_seconds)
    gathers = os.environ.get("LOCAL_RANK", "0") == "0"  # one rank per machine
    try:
        with time_limit(_MEASURE_SECONDS, on_late=_end_hang):
            hosts = distributed.run_on_all_ranks(lambda: gather_host(loaded, variables) if gathers else None)
            link = ranks.measure_link()
            rank = ranks.gather_rank(arrived_seconds=max(distributed.gather_objects(waited)) - waited)
            all_ranks = distributed.gather_objects(rank)
    except RuntimeError as error:  # of NCCL or gloo: a rank or the link has failed
        raise LostContact(f"all ranks are connected, but cannot communicate: {error}\n{_HANG_FIX}") from error
    facts = Facts(tuple(host for host in hosts if host is not None), tuple(all_ranks), link)
    code = _report(facts, loaded, as_json=as_json) if distributed.is_main() else 0
    return distributed.shut_down(distributed.broadcast_object(code))


def _report(facts: Facts, loaded: LoadedConfig | None, *, as_json: bool) -> int:
    """Print the facts, including the job's, and the findings; return the exit code."""
    if loaded is not None:
        facts = replace(facts, job=job_facts.gather_job(loaded))
    findings = check_facts(facts)
    if as_json:  # what `--facts` reads
        listed = [asdict(finding) | {"severity": finding.severity.name.lower()} for finding in findings]
        print_json({"facts": asdict(facts), "findings": listed}, indent=1)
        return int(has_severe(findings))
    for host in facts.hosts:
        if len(facts.hosts) > 1:
            print(printable(f"{host.hostname}:"))
        print_facts(_host_lines(host))
        for gap in host.unread:
            print(printable(f"unknown: {gap}"))
    if facts.link is not None:
        _print_link(facts, facts.link)
    print()
    for finding in findings:
        print(printable(str(finding)))
    if not findings:
        print("nothing to fix")
    return int(has_severe(findings))


def _end_hang() -> None:
    """Report that a collective hangs, and end this process."""
    if distributed.is_main():
        print(
            f"FIX: all ranks have started, but measurements between them did not end within {_MEASURE_SECONDS:g} s\n"
            f"    why: a collective hangs, and so would training\n{_HANG_FIX}",
            flush=True,
        )
    exit_process(1)


_POLL_SECONDS = 0.05
_WORK_SECONDS = 60.0
"""Time limit of a rank's work between two collectives, such as gathering the facts of its machine."""


def rendezvous(variables: Mapping[str, str], *, seconds: float) -> float:
    """Create a process group of all launched ranks, and return the seconds that this rank waited. Collective.

    Uses gloo, and NCCL on GPUs. Raises LostContact on every rank that has arrived if another does not arrive in time.
    """
    rank, world = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    store = _store(variables, rank=rank, seconds=seconds)
    started = time.monotonic()
    store.set(f"arrived/{rank}", socket.gethostname())
    deadline = time.monotonic() + seconds
    missing = list(range(world))
    if rank == 0:
        while missing := [rank for rank in missing if not store.check([f"arrived/{rank}"])]:
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        store.set("missing", json.dumps(missing))
        if missing:
            time.sleep(4 * _POLL_SECONDS)  # the others read the answer before the store ends with this process
    else:
        try:
            while not store.check(["missing"]) and time.monotonic() < deadline + seconds:
                time.sleep(_POLL_SECONDS)
            missing = json.loads(store.get("missing")) if store.check(["missing"]) else [0]
        except RuntimeError as error:
            raise LostContact("lost the connection to rank 0: it exited.") from error
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        named = f"rank {shown}" if len(missing) == 1 else f"{len(missing)} (rank {shown})"
        raise LostContact(
            f"of {world} ranks, {named} did not arrive within {seconds:g} s. Check the output "
            "of that process, whether it was started (machine_rank, num_machines, num_processes of the accelerate "
            "config), and whether a firewall is between the machines. `--wait SECONDS` waits longer."
        )
    waited = time.monotonic() - started
    if torch.cuda.is_available():
        local, num_devices = int(variables.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= num_devices:
            raise UserError(
                f"{variables.get('LOCAL_WORLD_SIZE', local + 1)} processes were launched on {socket.gethostname()}, "
                f"and torch sees {num_devices} GPUs there: NCCL refuses two ranks on one. Launch {num_devices} per "
                "machine, or check CUDA_VISIBLE_DEVICES."
            )
        torch.cuda.set_device(local)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=seconds + _WORK_SECONDS),
        )
    except RuntimeError as error:
        raise LostContact(
            f"all {world} ranks have started, but they cannot connect to each other: {str(error).splitlines()[0]}\n"
            "  `export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0` with the interface of their network (`ip -br "
            "address`), and open its ports in the firewall."
        ) from error
    return waited


def _store(variables: Mapping[str, str], *, rank: int, seconds: float) -> Store:
    """Return the launcher's store, or one that rank 0 hosts."""
    address, port = variables.get("MASTER_ADDR", "127.0.0.1"), int(variables.get("MASTER_PORT", "29500"))
    is_hosted_by_launcher = variables.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    is_host = rank == 0 and not is_hosted_by_launcher
    try:
        deadline = time.monotonic() + seconds
        while not is_host:  # torch itself would print a C++ trace for each attempt
            try:
                socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic())).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_SECONDS)
        timeout = timedelta(seconds=seconds)
        store = TCPStore(address, port, is_master=is_host, timeout=timeout, wait_for_workers=False)
        return PrefixStore(f"doctor/{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    except (RuntimeError, OSError) as error:
        raise LostContact(
            f"rank {rank} on {socket.gethostname()} has not reached {address}, port {port}, within {seconds:g} s: rank "
            "0 has not started there, or a firewall is between them. `main_process_ip` and `main_process_port` of the "
            f"accelerate config must be rank 0's; try `nc -vz {address} {port}`."
        ) from error


@contextmanager
def time_limit(seconds: float, *, on_late: Callable[[], None]) -> Iterator[None]:
    """Call `on_late` in another thread if the block takes longer: a collective cannot be interrupted."""
    timer = threading.Timer(seconds, on_late)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# --- the report


_MAX_PAIRS = 12


def _host_lines(host: HostFacts) -> Iterator[tuple[str, str]]:
    system, software, gpus = host.system, host.software, host.gpus
    environment = f"{', WSL2' if system.is_wsl else ''}{', in a container' if system.is_container else ''}"
    yield "system", f"{system.platform}{environment}"
    yield "python", software.python
    yield "packages", ", ".join(f"{name} {number}" for name, number in software.packages.items())
    if gpus.driver is not None:
        built = f"torch has CUDA {software.torch_cuda}, NCCL {software.nccl}"
        yield "driver", f"{gpus.driver}, CUDA up to {gpus.driver_cuda}; {built}"
    for gpu in gpus.gpus:
        parts = [
            f"{gpu.name}, {format_size(gpu.memory_bytes)}",
            f"sm_{gpu.capability[0]}{gpu.capability[1]}" if gpu.capability is not None else "",
            f"{gpu.power_watts or 0:.0f} of {gpu.power_limit_watts:.0f} W" if gpu.power_limit_watts is not None else "",
            f"{gpu.temperature_celsius} C" if gpu.temperature_celsius is not None else "",
            f"{gpu.clock_mhz} of {gpu.max_clock_mhz} MHz" if gpu.clock_mhz is not None else "",
            f"PCIe {gpu.pcie_generation} x{gpu.pcie_width}" if gpu.pcie_width else "",
            f"ECC {'on' if gpu.ecc else 'off'}" if gpu.ecc is not None else "",
            "MIG" * gpu.mig,
        ]
        if gpu.pcie_width:
            parts[5] += f" (at most {gpu.max_pcie_generation} x{gpu.max_pcie_width})"
        yield f"GPU {gpu.index}", ", ".join(filter(None, parts))
    if gpus.topology is not None:
        links = Counter(pair_links(gpus.topology).values())
        yield "links", ", ".join(f"{count} x {link}" for link, count in links.items())
    cores = f"{system.usable_cores} usable of {system.num_cores}"
    yield "cores", f"{cores}, {system.num_numa_nodes} NUMA nodes" if system.num_numa_nodes > 1 else cores
    maximum = system.memory_limit_bytes
    limit = "" if maximum is None else f", the container may use {format_size(maximum)}"
    yield "memory", f"{format_size(system.available_bytes)} free of {format_size(system.memory_bytes)}{limit}"
    yield "open files", f"{system.files_soft:,}, which a run raises up to {system.files_hard:,} if it needs more"
    if host.network.interfaces:
        states = (f"{link.name} {link.address}{'' if link.is_up else ' (down)'}" for link in host.network.interfaces)
        yield "interfaces", ", ".join(states)
    if host.network.infiniband:
        yield "InfiniBand", ", ".join(f"{port.device} {port.state} {port.rate}" for port in host.network.infiniband)
    hub = host.network.hub
    if hub is not None:
        answer = hub.problem or f"answers in {hub.seconds or 0:.2f} s"
        yield "hub", f"{hub.endpoint}: {'not contacted (HF_HUB_OFFLINE)' if hub.is_offline_wanted else answer}"
    for disk in host.storage.disks:
        speed = disk.write_bytes_per_second
        written = "" if speed is None else f", writes {format_size(round(speed))}/s"
        yield f"{disk.name} folder", f"{disk.folder} ({disk.filesystem}), {format_size(disk.free_bytes)} free{written}"
    if host.variables:
        yield "variables", " ".join(f"{name}={value}" for name, value in host.variables.items())


def _print_link(facts: Facts, link: LinkFacts) -> None:
    hosts = len({rank.hostname for rank in facts.ranks})
    print(f"\nall-reduce over {facts.world} ranks on {hosts} host{'s' * (hosts > 1)}, {link.backend}")
    world, table = facts.world, number_table("size", "time", "algorithm bandwidth", "bus bandwidth")
    for speed in link.all_reduce:
        rate = speed.num_bytes / speed.seconds
        bus = 2 * (world - 1) / world * rate
        table.add_row(format_size(speed.num_bytes), _time(speed.seconds), _rate(rate), _rate(bus))
    print_table(table)
    if len(link.pairs) > 1:
        slowest = sorted(link.pairs, key=lambda pair: pair.bytes_per_second)[:_MAX_PAIRS]
        typical = median(pair.bytes_per_second for pair in link.pairs)
        shown = f"{len(slowest)} of {len(link.pairs)}; median {_rate(typical)}"
        print(f"\nmessages between two ranks, the slowest first ({shown})")
        table = number_table("ranks", "latency", "bandwidth")
        for pair in slowest:
            table.add_row(f"{pair.first}-{pair.second}", _time(pair.latency_seconds), _rate(pair.bytes_per_second))
        print_table(table)
    computed = compute_seconds(facts)
    job = facts.job if facts.job is not None and facts.job.num_parameters else NOMINAL
    against = "" if computed is None else f", against about {_time(computed)} of computing"
    trained = f"{job.num_trained:,} of {job.num_parameters:,} parameters trained"
    print(f"\ncommunication per step of {job.file} ({trained}){against}")
    table = number_table("strategy", "sent by a rank", "time", "of computing", "")
    for cost in strategy_costs(facts):
        share = "" if cost.share is None else f"{cost.share:.0%}"
        table.add_row(cost.name, format_size(round(cost.num_bytes)), _time(cost.seconds), share, cost.verdict)
    print_table(table)


def _time(seconds: float) -> str:
    """Return a duration in a suitable unit.

    >>> _time(0.00012), _time(2.5)
    ('120 us', '2.50 s')
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _rate(bytes_per_second: float) -> str:
    return f"{format_size(round(bytes_per_second))}/s"
