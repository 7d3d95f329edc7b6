"""All checks of all machines and ranks."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from finetune.commands.doctor.checks.drivers import check_drivers
from finetune.commands.doctor.checks.findings import Finding, merge_hosts, note
from finetune.commands.doctor.checks.gpus import check_gpus
from finetune.commands.doctor.checks.host import check_host
from finetune.commands.doctor.checks.links import check_links
from finetune.commands.doctor.checks.network import check_network
from finetune.commands.doctor.checks.ranks import check_ranks
from finetune.commands.doctor.checks.software import check_software
from finetune.commands.doctor.checks.speed import check_speed
from finetune.commands.doctor.checks.storage import check_storage
from finetune.commands.doctor.checks.variables import check_variables
from finetune.commands.doctor.facts.host import HostFacts
from finetune.commands.doctor.facts.launch import Facts

HOST_CHECKS: tuple[Callable[[HostFacts, Facts], Iterator[Finding]], ...] = (
    check_drivers,
    check_gpus,
    check_links,
    check_network,
    check_host,
    check_storage,
    check_software,
    check_variables,
)


def check_facts(facts: Facts) -> list[Finding]:
    """Return what is found, the most severe first; what several machines have in common once."""
    found = [
        replace(finding, hosts=(host.hostname,))
        for host in facts.hosts
        for check in HOST_CHECKS
        for finding in check(host, facts)
    ]
    everywhere = [*check_ranks(facts), *check_speed(facts), *_job(facts)]
    names = tuple(host.hostname for host in facts.hosts)
    return merge_hosts([*found, *(replace(each, hosts=names) for each in everywhere)], num_hosts=len(facts.hosts))


def _job(facts: Facts) -> Iterator[Finding]:
    if facts.job is not None and facts.job.problem is not None:
        yield note(
            "job",
            f"{facts.job.file}: {facts.job.problem}",
            why="room on disk and time on the link cannot be compared with what the job needs",
            fix=f"finetune check {facts.job.file} --model",
        )
