"""The rendezvous of the ranks: over the launcher's store, with a time limit, so that a missing rank is named."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from finetune.errors import LostContact, UserError

_POLL_SECONDS = 0.05

_ALL_ARRIVED = "all"

_WORK_SECONDS = 60.0
"""The most that a rank takes between two collectives, such as for gathering the facts of its machine."""


def rendezvous(variables: Mapping[str, str], *, seconds: float) -> float:
    """Create a process group of all launched ranks, and return how long this one waited for the last. Collective.

    Over gloo, and also NCCL where there are GPUs. Raises LostContact on every rank that has arrived when one does not
    within the time limit.
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
    """Wait until the port is open; raises OSError. torch would print a C++ trace for each attempt."""
    while True:
        try:
            socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)


def _await_all(store: Store, *, rank: int, world: int, seconds: float) -> None:
    """Wait until rank 0 has seen every rank; raises LostContact naming those that it has not."""
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
        raise LostContact(
            f"of {world} ranks, {_ranks(missing)} did not arrive within {seconds:g} s. Check the output "
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
        raise LostContact("the store of rank 0 is gone: rank 0 exited.") from error
    return [0]


def _ranks(missing: list[int]) -> str:
    shown = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
    return f"rank {shown}" if len(missing) == 1 else f"{len(missing)} (rank {shown})"


@contextmanager
def time_limit(seconds: float, *, on_late: Callable[[], None]) -> Iterator[None]:
    """Call `on_late` in another thread where the block takes longer: a collective cannot be interrupted."""
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
