"""`finetune doctor`: the facts of a run's machines, the measurements of its ranks, and what to fix before a run."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from finetune.commands.doctor.checks import check_facts
from finetune.commands.doctor.facts import Facts, HostFacts, gather_host, read_facts
from finetune.commands.doctor.report import print_as_json, print_report
from finetune.commands.doctor.subjects.findings import has_severe
from finetune.commands.doctor.subjects.job import folders_of, gather_job
from finetune.commands.doctor.subjects.ranks import gather_rank, measure_link
from finetune.commands.doctor.subjects.rendezvous import is_launched, rendezvous, time_limit
from finetune.config.load import LoadedConfig, load_config
from finetune.data.token_cache.cache import DEFAULT_FOLDER
from finetune.errors import LostContact
from finetune.run.remote.download import with_local_folder
from finetune.runtime import distributed
from finetune.runtime.processes import exit_process
from finetune.runtime.text.library_output import quiet_libraries

WAIT_SECONDS = 60.0

_MEASURE_SECONDS = 180.0
"""The time limit of all measurements between ranks; after it they are taken to hang."""

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

    With a job, its folders, models and datasets are checked, too. `recorded` is checked instead of this machine. On
    several processes, the facts include measurements between them, and rank 0 prints. Raises ConfigError for a mistake
    in the job, and LostContact when a rank does not arrive. Collective.
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
    """Return the facts of all machines and ranks; one rank of each machine gathers its facts. Collective."""
    is_local_main = os.environ.get("LOCAL_RANK", "0") == "0"
    gathered = distributed.run_on_all_ranks(partial(_gather_host, loaded, variables) if is_local_main else lambda: None)
    hosts = tuple(host for host in gathered if host is not None)
    link = measure_link()
    longest = max(distributed.gather_objects(waited))
    rank = gather_rank(arrived_seconds=longest - waited)
    return Facts(hosts, tuple(distributed.gather_objects(rank)), link)


def _end_hang() -> None:
    """End this process, whose ranks are connected and now hang in a collective."""
    if distributed.is_main():
        print(
            f"FIX: all ranks have started, and measuring between them did not end within {_MEASURE_SECONDS:g} s\n"
            f"    why: a collective hangs, and so would training\n{_HANG_FIX}",
            flush=True,
        )
    exit_process(1)
