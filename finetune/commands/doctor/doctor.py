"""`finetune doctor`: what the machines of a run have, what the ranks measure, and what must be fixed before a run."""

import os
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from finetune.commands.doctor.checks.check import check_facts
from finetune.commands.doctor.checks.findings import has_severe
from finetune.commands.doctor.facts.host import HostFacts
from finetune.commands.doctor.facts.launch import Facts, LinkFacts, RankFacts, read_facts
from finetune.commands.doctor.gather.host import gather_host
from finetune.commands.doctor.gather.job import gather_job, places_of
from finetune.commands.doctor.link import measure
from finetune.commands.doctor.link.rendezvous import is_launched, rendezvous, time_limit
from finetune.commands.doctor.report import print_as_json, print_report
from finetune.config.load import LoadedConfig, load_config
from finetune.data.token_cache.cache import DEFAULT_FOLDER
from finetune.errors import LostContact
from finetune.run.remote.download import with_local_folder
from finetune.runtime import distributed
from finetune.runtime.environment import nccl_version, package_versions
from finetune.runtime.processes import exit_process
from finetune.runtime.text.library_output import quiet_libraries

WAIT_SECONDS = 60.0

_MEASURE_SECONDS = 180.0
"""For all measurements between ranks: what takes longer hangs."""

_HANG_FIX = (
    "    fix: export NCCL_P2P_DISABLE=1 (GPUs of one machine), or NCCL_SOCKET_IFNAME=eth0 with the interface of the\n"
    "         machines' network; NCCL_DEBUG=INFO shows the way that NCCL takes"
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

    With a job, its own folders, names and model are looked at. `recorded` is checked in place of this machine. On
    several processes, what is measured between them is part of the facts, and rank 0 prints. Raises ConfigError where
    the job is not right, and LostContact where a rank does not arrive. Collective.
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
    except RuntimeError as error:  # of NCCL or gloo: a rank has failed, or the link
        raise LostContact(f"all ranks have met, but cannot communicate: {error}\n{_HANG_FIX}") from error
    code = _report(_with_job(facts, loaded), as_json=as_json) if distributed.is_main() else 0
    return distributed.shut_down(distributed.broadcast_object(code))


def _report(facts: Facts, *, as_json: bool) -> int:
    findings = check_facts(facts)
    (print_as_json if as_json else print_report)(facts, findings)
    return 1 if has_severe(findings) else 0


def _with_job(facts: Facts, loaded: LoadedConfig | None) -> Facts:
    return facts if loaded is None else replace(facts, job=gather_job(loaded))


def _gather_host(loaded: LoadedConfig | None, variables: Mapping[str, str]) -> HostFacts:
    usual = {"cache": Path(DEFAULT_FOLDER).expanduser(), "run": Path.cwd()}
    return gather_host(places_of(loaded.config) if loaded is not None else usual, variables=variables)


def _gather_ranks(loaded: LoadedConfig | None, variables: Mapping[str, str], *, waited: float) -> Facts:
    """Return the facts of all machines and ranks; one rank of each machine looks at it. Collective."""
    is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"
    found = distributed.run_on_all_ranks(partial(_gather_host, loaded, variables) if is_first_here else lambda: None)
    hosts = tuple(host for host in found if host is not None)
    link: LinkFacts = measure.measure_link()
    offset = measure.measure_clock_offset()
    longest = max(distributed.gather_objects(waited))
    own = RankFacts(
        rank=distributed.rank(),
        hostname=socket.gethostname(),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        arrived_seconds=longest - waited,
        clock_offset_seconds=offset,
        python=platform.python_version(),
        packages=package_versions(),
        torch_cuda=torch.version.cuda,
        nccl=nccl_version(),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        flops_per_second=measure.measure_flops(),
    )
    return Facts(hosts, tuple(distributed.gather_objects(own)), link)


def _end_hang() -> None:
    """End this process, whose ranks have met and now wait for each other without an end."""
    if distributed.is_main():
        print(
            f"FIX: all ranks have started, and measuring between them has not ended within {_MEASURE_SECONDS:g} s\n"
            f"    why: a collective hangs, and so would training\n{_HANG_FIX}",
            flush=True,
        )
    exit_process(1)
