"""`finetune doctor`: facts of a run's machines, measurements between its ranks, and problems to fix first."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from finetune.commands.doctor.checks import check_facts
from finetune.commands.doctor.facts import Facts, HostFacts, gather_host, read_facts
from finetune.commands.doctor.report import print_as_json, print_report
from finetune.commands.doctor.subjects.findings import has_severe
from finetune.commands.doctor.subjects.job import folders_of, gather_job
from finetune.commands.doctor.subjects.ranks import gather_rank, measure_link
from finetune.config.load import LoadedConfig, load_config
from finetune.data.token_cache.cache import DEFAULT_FOLDER
from finetune.errors import LostContact, UserError
from finetune.run.remote.download import with_local_folder
from finetune.runtime import distributed
from finetune.runtime.processes import exit_process
from finetune.runtime.text.library_output import quiet_libraries

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
        return _report(read_facts(recorded), as_json=as_json)
    loaded = with_local_folder(load_config(path, overrides)) if path else None
    variables = dict(os.environ)  # libraries set some when they are imported
    quiet_libraries(is_main=distributed.is_main())
    if not is_launched():
        facts = Facts((_gather_host(loaded, variables),))
        return _report(_with_job(facts, loaded), as_json=as_json)
    waited = rendezvous(os.environ, seconds=wait_seconds)
    try:
        with time_limit(_MEASURE_SECONDS, on_late=_end_hang):
            facts = _gather_ranks(loaded, variables, waited=waited)
    except RuntimeError as error:  # of NCCL or gloo: a rank or the link has failed
        raise LostContact(f"all ranks are connected, but cannot communicate: {error}\n{_HANG_FIX}") from error
    code = _report(_with_job(facts, loaded), as_json=as_json) if distributed.is_main() else 0
    return distributed.shut_down(distributed.broadcast_object(code))


def _report(facts: Facts, *, as_json: bool) -> int:
    findings = check_facts(facts)
    (print_as_json if as_json else print_report)(facts, findings)
    return 1 if has_severe(findings) else 0


def _with_job(facts: Facts, loaded: LoadedConfig | None) -> Facts:
    return facts if loaded is None else replace(facts, job=gather_job(loaded))


def _gather_host(loaded: LoadedConfig | None, variables: Mapping[str, str]) -> HostFacts:
    folders = {"cache": Path(DEFAULT_FOLDER).expanduser(), "run": Path.cwd()}
    return gather_host(folders_of(loaded.config) if loaded is not None else folders, variables=variables)


def _gather_ranks(loaded: LoadedConfig | None, variables: Mapping[str, str], *, waited: float) -> Facts:
    """Return the facts of all machines and ranks; one rank per machine gathers those of the machine. Collective."""
    is_local_main = os.environ.get("LOCAL_RANK", "0") == "0"
    gathered = distributed.run_on_all_ranks(partial(_gather_host, loaded, variables) if is_local_main else lambda: None)
    hosts = tuple(host for host in gathered if host is not None)
    link = measure_link()
    longest = max(distributed.gather_objects(waited))
    rank = gather_rank(arrived_seconds=longest - waited)
    return Facts(hosts, tuple(distributed.gather_objects(rank)), link)


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

_ALL_ARRIVED = "all"

_WORK_SECONDS = 60.0
"""Time limit of a rank's work between two collectives, such as gathering the facts of its machine."""


def rendezvous(variables: Mapping[str, str], *, seconds: float) -> float:
    """Create a process group of all launched ranks, and return the seconds that this rank waited. Collective.

    Uses gloo, and also NCCL on machines with GPUs. Raises LostContact on every rank that has arrived if another one
    does not arrive within the time limit.
    """
    rank, world = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    store = PrefixStore(
        f"doctor/{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}", _store(variables, rank=rank, seconds=seconds)
    )
    started = time.monotonic()
    _await_all(store, rank=rank, world=world, seconds=seconds)
    waited = time.monotonic() - started
    if torch.cuda.is_available():
        torch.cuda.set_device(_own_device(variables))
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


def _own_device(variables: Mapping[str, str]) -> int:
    local, num_devices = int(variables.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= num_devices:
        raise UserError(
            f"{variables.get('LOCAL_WORLD_SIZE', local + 1)} processes were launched on {socket.gethostname()}, and "
            f"torch sees {num_devices} GPUs there: NCCL refuses two ranks on one. Launch {num_devices} per machine, or "
            "check CUDA_VISIBLE_DEVICES."
        )
    return local


def _store(variables: Mapping[str, str], *, rank: int, seconds: float) -> Store:
    """Return the launcher's store, or one that rank 0 hosts."""
    address, port = variables.get("MASTER_ADDR", "127.0.0.1"), int(variables.get("MASTER_PORT", "29500"))
    is_hosted_by_launcher = variables.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    is_host = rank == 0 and not is_hosted_by_launcher
    try:
        if not is_host:
            _await_port(address, port, deadline=time.monotonic() + seconds)
        return TCPStore(address, port, is_master=is_host, timeout=timedelta(seconds=seconds), wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        raise LostContact(
            f"rank {rank} on {socket.gethostname()} has not reached {address}, port {port}, within {seconds:g} s: rank "
            "0 has not started there, or a firewall is between them. `main_process_ip` and `main_process_port` of the "
            f"accelerate config must be rank 0's; try `nc -vz {address} {port}`."
        ) from error


def _await_port(address: str, port: int, *, deadline: float) -> None:
    """Wait until the port is open; raises OSError. torch itself would print a C++ trace for each attempt."""
    while True:
        try:
            socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)


def _await_all(store: Store, *, rank: int, world: int, seconds: float) -> None:
    """Wait until every rank has reached rank 0; raises LostContact that names the missing ones."""
    store.set(f"arrived/{rank}", socket.gethostname())
    deadline = time.monotonic() + seconds
    if rank == 0:
        missing = _await_arrivals(store, world=world, deadline=deadline)
        store.set("answer", ",".join(map(str, missing)) or _ALL_ARRIVED)
        if missing:
            time.sleep(4 * _POLL_SECONDS)  # the others read the answer before the store ends with this process
    else:
        missing = _await_answer(store, deadline=deadline + seconds)
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        named = f"rank {shown}" if len(missing) == 1 else f"{len(missing)} (rank {shown})"
        raise LostContact(
            f"of {world} ranks, {named} did not arrive within {seconds:g} s. Check the output "
            "of that process, whether it was started (machine_rank, num_machines, num_processes of the accelerate "
            "config), and whether a firewall is between the machines. `--wait SECONDS` waits longer."
        )


def _await_arrivals(store: Store, *, world: int, deadline: float) -> list[int]:
    missing = list(range(world))
    while True:
        missing = [rank for rank in missing if not store.check([f"arrived/{rank}"])]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(_POLL_SECONDS)


def _await_answer(store: Store, *, deadline: float) -> list[int]:
    try:
        while time.monotonic() < deadline:
            if store.check(["answer"]):
                answer = store.get("answer").decode()
                return [] if answer == _ALL_ARRIVED else [int(number) for number in answer.split(",")]
            time.sleep(_POLL_SECONDS)
    except RuntimeError as error:
        raise LostContact("lost the connection to rank 0: it exited.") from error
    return [0]


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


def is_launched() -> bool:
    """Return whether this process is one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1
