"""What was measured between ranks: pairs that are slow, links that are not used, and whether a strategy suits them."""

import math
from collections.abc import Iterator
from statistics import median

from finetune.commands.doctor.checks.findings import Finding, note, should_fix
from finetune.commands.doctor.checks.links import P2P_OFF, pair_links
from finetune.commands.doctor.facts.launch import Facts, PairSpeed
from finetune.commands.doctor.link.strategies import HIDDEN_SHARE, bus_bandwidth, compute_seconds, strategy_costs
from finetune.runtime.resources import format_size

SLOW_PAIR = 0.5
"""Of the median speed of the pairs of its kind."""

_NVLINK_BYTES_PER_SECOND = 20e9
"""Less than that over NVLink means that it is not used: PCIe 4 reaches it, NVLink is several times faster."""


def check_speed(facts: Facts) -> Iterator[Finding]:
    """Yield what is slow between the ranks of a launch."""
    if facts.link is None or facts.world < 2:
        return
    yield from _slow_pairs(facts)
    speed = bus_bandwidth(facts.link, world=facts.world)
    links = [link for host in facts.hosts for link in pair_links(host.gpus.topology).values()]
    is_nvlinked = bool(links) and len(facts.hosts) == 1 and all(link.startswith("NV") for link in links)
    if is_nvlinked and facts.link.backend == "nccl" and speed < _NVLINK_BYTES_PER_SECOND:
        yield should_fix(
            "nvlink-unused",
            f"the GPUs have NVLink, and an all-reduce reaches {format_size(round(speed))}/s",
            why="NCCL does not use it: P2P is switched off, or the fabric manager of the NVSwitches does not run",
            fix="unset NCCL_P2P_DISABLE; sudo systemctl restart nvidia-fabricmanager; NCCL_DEBUG=INFO shows the way",
        )
    yield from _strategy(facts)


def _slow_pairs(facts: Facts) -> Iterator[Finding]:
    hosts = {rank.rank: rank.hostname for rank in facts.ranks}
    pairs = facts.link.pairs if facts.link is not None else ()
    has_links = facts.link is not None and facts.link.backend == "nccl"  # processes of one CPU have none between them
    for is_within in (True, False) if has_links else (False,):
        alike = [each for each in pairs if (hosts[each.first] == hosts[each.second]) == is_within]
        usual = median(each.bytes_per_second for each in alike) if alike else 0.0
        for pair in alike:
            if pair.bytes_per_second < SLOW_PAIR * usual:
                yield _slow_pair(facts, pair, usual=usual, is_within=is_within)


def _slow_pair(facts: Facts, pair: PairSpeed, *, usual: float, is_within: bool) -> Finding:
    one, other = (next(rank for rank in facts.ranks if rank.rank == each) for each in (pair.first, pair.second))
    link = ""
    if is_within:
        host = next(each for each in facts.hosts if each.hostname == one.hostname)
        link = pair_links(host.gpus.topology).get(f"{one.local_rank}-{other.local_rank}", "")
    fixes = f"{P2P_OFF}, and measure again" if link in ("SYS", "PHB", "NODE") else "look at the load of that machine"
    return should_fix(
        "slow-pair",
        f"rank {one.rank} ({one.hostname}) and rank {other.rank} ({other.hostname}) exchange "
        f"{format_size(round(pair.bytes_per_second))}/s{f' over {link}' if link else ''}, other pairs "
        f"{format_size(round(usual))}/s",
        why="a ring is as fast as its slowest link",
        fix=fixes if is_within else "look at cable, port (`ethtool`, `ibstat`) and switch of these machines",
    )


def _strategy(facts: Facts) -> Iterator[Finding]:
    computed, costs = compute_seconds(facts), strategy_costs(facts)
    job = facts.job
    if computed is None or job is None or not costs:
        return
    fit = [cost for cost in costs if (cost.share or 0.0) <= HIDDEN_SHARE]
    ddp, sharded = costs[0], costs[-1]
    if fit:
        names = ", ".join(cost.name for cost in fit)
        yield note(
            "strategy",
            f"this link suits {names}",
            why=f"a step computes for about {computed:.2g} s; communication takes {ddp.seconds:.2g} s with ddp and "
            f"{sharded.seconds:.2g} s with fsdp2 or zero3",
            fix="take the first of them that fits into memory (`finetune plan`)",
        )
        return
    wanted = job.global_batch_size * (ddp.share or 0.0) / HIDDEN_SHARE
    yield should_fix(
        "link-bound",
        f"communication takes {ddp.seconds:.2g} s per step with ddp and {sharded.seconds:.2g} s with fsdp2 or zero3, "
        f"computing about {computed:.2g} s",
        why="the ranks wait for the link; more ranks make it worse",
        fix=f"train.global_batch_size: {_rounded_up(wanted, facts.world * job.microbatch_size)} (microbatches are "
        "accumulated, gradients sent once), or model.lora; between machines HSDP shards within each alone",
    )


def _rounded_up(count: float, multiple: int) -> int:
    return math.ceil(count / multiple) * multiple
