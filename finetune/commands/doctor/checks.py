"""All checks of all machines and ranks."""

from collections.abc import Iterator
from dataclasses import replace

from finetune.commands.doctor.facts import Facts, HostFacts
from finetune.commands.doctor.strategies import check_speed
from finetune.commands.doctor.subjects.findings import Finding, merge_hosts, note
from finetune.commands.doctor.subjects.gpus import check_gpus
from finetune.commands.doctor.subjects.links import check_links
from finetune.commands.doctor.subjects.network import check_hub, check_network
from finetune.commands.doctor.subjects.ranks import check_ranks
from finetune.commands.doctor.subjects.software import check_drivers, check_software
from finetune.commands.doctor.subjects.storage import check_storage
from finetune.commands.doctor.subjects.system import check_system
from finetune.commands.doctor.subjects.variables import check_variables


def check_facts(facts: Facts) -> list[Finding]:
    """Return the findings, the most severe first; one that several machines share is there once."""
    findings = [replace(finding, hosts=(host.hostname,)) for host in facts.hosts for finding in check_host(host, facts)]
    names = tuple(host.hostname for host in facts.hosts)
    of_launch = [*check_ranks(facts.ranks), *check_speed(facts), *_check_job(facts)]
    findings += [replace(finding, hosts=names) for finding in of_launch]
    return merge_hosts(findings, num_hosts=len(facts.hosts))


def check_host(host: HostFacts, facts: Facts) -> Iterator[Finding]:
    """Yield the findings of one machine."""
    gpus, system, variables, job = host.gpus, host.system, host.variables, facts.job
    num_gpus = len(gpus.gpus)
    num_launched = sum(rank.hostname == host.hostname for rank in facts.ranks)
    is_multi_host = variables.get("WORLD_SIZE", "1") != variables.get("LOCAL_WORLD_SIZE", "1")
    yield from check_drivers(gpus, host.software, is_hidden=variables.get("CUDA_VISIBLE_DEVICES") in ("", "-1"))
    yield from check_gpus(gpus, is_wsl=system.is_wsl, num_ranks=num_launched)
    has_infiniband = any(port.state == "ACTIVE" for port in host.network.infiniband)
    yield from check_links(gpus, system, variables, has_infiniband=has_infiniband)
    yield from check_network(
        host.network,
        variables,
        is_multi_host=is_multi_host or len(facts.hosts) > 1,
        has_gpu=num_gpus > 0,
        locked_bytes=system.locked_memory_bytes,
    )
    if host.network.hub is not None:
        yield from check_hub(host.network.hub, () if job is None else job.names)
    yield from check_system(
        system,
        variables,
        num_gpus=num_gpus,
        num_ranks=max(1, num_launched or num_gpus),
        world=facts.world,
        num_parameters=0 if job is None else job.num_parameters,
    )
    yield from check_storage(host.storage, job, is_wsl=system.is_wsl, has_many_gpus=num_gpus > 1)
    yield from check_software(host.software, num_gpus=num_gpus)
    yield from check_variables(variables, gpus)


def _check_job(facts: Facts) -> Iterator[Finding]:
    if facts.job is not None and facts.job.problem is not None:
        yield note(
            "job",
            f"{facts.job.file}: {facts.job.problem}",
            why="disk space and communication cannot be compared with the needs of the job",
            fix=f"finetune check {facts.job.file} --model",
        )
