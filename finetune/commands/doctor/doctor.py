"""`finetune doctor`: facts of a run's machines, measurements between its ranks, and problems to fix first."""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from finetune.commands.doctor import ranks
from finetune.commands.doctor.checks import bus_bandwidth, check_facts
from finetune.commands.doctor.facts import Facts, HostFacts, gather_host, gather_names
from finetune.commands.doctor.findings import Severity
from finetune.commands.doctor.ranks import LinkFacts
from finetune.commands.printing import number_table, print_facts, print_json, print_table
from finetune.config.load import LoadedConfig, load_config, with_local_folder
from finetune.errors import LostContact
from finetune.runtime import distributed
from finetune.runtime.processes import exit_process
from finetune.runtime.resources import format_size
from finetune.runtime.text.terminal import printable, quiet_libraries

WAIT_SECONDS = 60.0

_GATHER_SECONDS = 60.0
_MEASURE_SECONDS = 180.0
_HANG_FIX = (
    "    fix: export NCCL_P2P_DISABLE=1 (GPUs of one machine), or NCCL_SOCKET_IFNAME=eth0 with the interface of the\n"
    "         machines' network; NCCL_DEBUG=INFO shows the transport that NCCL chooses"
)
_GATHER_HANGS = (
    f"FIX: the facts of this machine were not read within {_GATHER_SECONDS:g} s\n"
    "    why: the GPU driver, the network or a disk does not answer, and a run would wait for it, too\n"
    "    fix: see whether `nvidia-smi` and `df` answer; reboot after an update of the driver"
)
_LINK_HANGS = (
    f"FIX: all ranks have started, but measurements between them did not end within {_MEASURE_SECONDS:g} s\n"
    f"    why: a collective hangs, and so would training\n{_HANG_FIX}"
)


def examine(
    path: Path | None, overrides: Sequence[str], *, as_json: bool = False, wait_seconds: float = WAIT_SECONDS
) -> int:
    """Print facts and findings, and return 1 where something must be fixed before a run, else 0.

    With a job, its folders, models and datasets are also checked. With several processes, the facts include
    measurements between them, and rank 0 prints. Raises ConfigError for a mistake in the job, and LostContact when a
    rank does not arrive. Collective.
    """
    loaded = with_local_folder(load_config(path, overrides)) if path else None
    variables = dict(os.environ)  # libraries set some when they are imported
    quiet_libraries(is_main=distributed.is_main())
    host = None
    if variables.get("LOCAL_RANK", "0") == "0":  # one rank per machine
        with time_limit(_GATHER_SECONDS, on_late=partial(_end_hang, _GATHER_HANGS)):
            host = gather_host(loaded, variables)
    if host is not None and int(variables.get("WORLD_SIZE", "1")) < 2:
        return _report(Facts((host,)), loaded, as_json=as_json)
    ranks.connect(variables, seconds=wait_seconds)
    try:
        with time_limit(_MEASURE_SECONDS, on_late=partial(_end_hang, _LINK_HANGS)):
            hosts = tuple(host for host in distributed.gather_objects(host) if host is not None)
            link = ranks.measure_link()
            facts = Facts(hosts, tuple(distributed.gather_objects(ranks.gather_rank())), link)
    except RuntimeError as error:  # of NCCL or gloo: a rank or the link has failed
        raise LostContact(f"all ranks are connected, but cannot communicate: {error}\n{_HANG_FIX}") from error
    code = _report(facts, loaded, as_json=as_json) if distributed.is_main() else 0
    return distributed.shut_down(distributed.broadcast_object(code))


@contextmanager
def time_limit(seconds: float, *, on_late: Callable[[], None]) -> Iterator[None]:
    """Call `on_late` in another thread if the block takes longer: a driver or a collective cannot be interrupted."""
    timer = threading.Timer(seconds, on_late)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end_hang(message: str) -> None:
    print(message, flush=True)
    exit_process(1)


def _report(facts: Facts, loaded: LoadedConfig | None, *, as_json: bool) -> int:
    """Print the facts, including the job's, and the findings; return the exit code."""
    if loaded is not None:
        facts = replace(facts, job=gather_names(loaded.config))
    findings = check_facts(facts)
    code = int(any(finding.severity is Severity.MUST_FIX for finding in findings))
    if as_json:
        listed = [asdict(finding) | {"severity": finding.severity.name.lower()} for finding in findings]
        print_json({"facts": asdict(facts), "findings": listed}, indent=1)
        return code
    for host in facts.hosts:
        if len(facts.hosts) > 1:
            print(printable(f"{host.hostname}:"))
        print_facts(((name, text) for name, text in _host_lines(host) if text), indent=20)
    if facts.link is not None:
        _print_link(facts, facts.link)
    print()
    for finding in findings:
        print(printable(str(finding)))
    if not findings:
        print("nothing to fix")
    return code


def _host_lines(host: HostFacts) -> Iterator[tuple[str, str]]:
    system, software, gpus, hub = host.system, host.software, host.gpus, host.hub
    yield "system", f"{system.platform}, {system.usable_cores} usable of {system.num_cores} cores"
    yield "memory", f"{format_size(system.available_bytes)} free of {format_size(system.memory_bytes)}"
    yield "packages", ", ".join(f"{name} {number}" for name, number in software.packages.items())
    if gpus.driver is not None:
        built = f"torch has CUDA {software.torch_cuda}, NCCL {software.nccl}"
        yield "driver", f"{gpus.driver}, CUDA up to {gpus.driver_cuda}; {built}"
    for gpu in gpus.gpus:
        used = f"{format_size(gpu.memory_used_bytes)} of {format_size(gpu.memory_bytes)} in use"
        yield f"GPU {gpu.index}", f"{gpu.name}, {used}"
    yield "links", ", ".join(f"{count} x {link}" for link, count in Counter(gpus.links.values()).items())
    interfaces = host.network.interfaces
    yield "interfaces", ", ".join(f"{each.name} {each.address}{'' if each.is_up else ' (down)'}" for each in interfaces)
    if hub is not None:
        yield "hub", f"{hub.endpoint}: {hub.problem or f'answers in {hub.seconds or 0:.2f} s'}"
    for disk in host.disks:
        yield disk.key, f"{disk.folder}, {format_size(disk.free_bytes)} free"
    yield "variables", " ".join(f"{name}={value}" for name, value in host.variables.items())


def _print_link(facts: Facts, link: LinkFacts) -> None:
    hosts = len(facts.hosts)
    print(f"\nall-reduce over {facts.world} ranks on {hosts} host{'s' * (hosts > 1)}, {link.backend}")
    table = number_table("size", "time", "algorithm bandwidth", "bus bandwidth")
    for speed in link.all_reduce:
        rates = (speed.num_bytes / speed.seconds, bus_bandwidth(speed, world=facts.world))
        shown = (f"{format_size(round(rate))}/s" for rate in rates)
        table.add_row(format_size(speed.num_bytes), f"{speed.seconds * 1e3:.2f} ms", *shown)
    print_table(table)
