"""A run on two or three hosts goes on when one is lost and takes it in again, and ends where an undisturbed one does.

Hosts are network namespaces and talk through gloo: what NCCL does when a host is lost is not seen here. A host that is
lost leaves the network first, so no connection to it is closed, as when a machine loses its power.
"""

from pathlib import Path

import pytest

from tests.launch.cluster import Host, cluster, has_namespaces, until
from tests.launch.hosts import LORA, SupervisedRun

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not has_namespaces(), reason="needs root, to make network namespaces"),
]

STRATEGIES = [
    pytest.param("multi_node_fsdp2", marks=pytest.mark.full),
    *(pytest.param(f"multi_node_{name}", marks=pytest.mark.slow) for name in ("ddp", "hsdp", "zero3")),
    pytest.param("zero2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_host_is_lost_and_returns(folder: Path, hosts: list[Host], strategy: str) -> None:
    run = SupervisedRun(folder, f"second-host-{strategy}", hosts, strategy)
    run.start(*hosts)
    run.lose_and_take_back(hosts[1])
    run.finish()
    reasons = [each["reason"] for each in run.attempts()]
    assert reasons[1] in ("h2 is lost", "h2 cannot be reached")  # whichever is noticed first
    assert reasons[::2] == ["starts", "h2 joined"] and reasons[3] == "the run has ended"
    assert f"attempt 2 on h1: {reasons[1]}" in run.text(hosts[0])


@pytest.mark.slow
def test_the_first_host_is_lost_and_returns(folder: Path, hosts: list[Host]) -> None:
    run = SupervisedRun(folder, "first-host", hosts, "multi_node_fsdp2")
    run.start(*hosts)
    run.lose_and_take_back(hosts[0])
    run.finish()
    assert [each["hosts"] for each in run.attempts()][1:3] == [["h2"], ["h2", "h1"]]


@pytest.mark.slow
def test_lora_on_hosts_that_come_and_go(folder: Path, hosts: list[Host]) -> None:
    run = SupervisedRun(folder, "lora", hosts, "multi_node_fsdp2", ranks_per_host=1, model=LORA)
    run.start(*hosts)
    run.lose_and_take_back(hosts[1])
    run.finish()


@pytest.mark.slow
def test_three_hosts_of_one_rank_of_which_one_is_lost(folder: Path) -> None:
    with cluster(3) as hosts:
        run = SupervisedRun(folder, "three-hosts", hosts, "multi_node_ddp", ranks_per_host=1)
        run.start(*hosts)
        run.lose_and_take_back(hosts[1])
        run.finish()


@pytest.mark.slow
def test_a_host_is_lost_in_the_middle_of_a_save(folder: Path, hosts: list[Host]) -> None:
    run = SupervisedRun(
        folder,
        "in-a-save",
        hosts,
        "multi_node_fsdp2",
        ranks_per_host=1,
        faults="save.manifest step=20 do=sleep seconds=4",
    )
    run.start(*hosts)
    until(lambda: any((run.run / "checkpoints").glob(".staging-step-000020*/manifest.json")) or _staged(run, 20))
    run.kill(hosts[0], at_step=0)
    run.until_hosts("h2")
    run.restart(hosts[0])
    run.finish()
    assert run.attempts()[1]["step"] == 10


def _staged(run: SupervisedRun, step: int) -> bool:
    return any((run.run / "checkpoints").glob(f".staging-step-{step:06d}*/progress.json"))


@pytest.mark.slow
def test_a_host_is_lost_while_an_attempt_starts(folder: Path, hosts: list[Host]) -> None:
    run = SupervisedRun(folder, "in-a-start", hosts, "multi_node_fsdp2", ranks_per_host=1)
    run.start(*hosts)
    until(lambda: (run.run / "supervisors" / "begun-000001").exists() and len(hosts[1].pids()) >= 3)
    run.said.append("h2 lost while attempt 1 starts")
    hosts[1].kill()
    run.until_hosts("h1")
    run.restart(hosts[1])
    run.until_hosts("h1", "h2")
    run.finish()


@pytest.mark.slow
def test_both_hosts_are_lost_and_return(folder: Path, hosts: list[Host]) -> None:
    run = SupervisedRun(folder, "both", hosts, "multi_node_fsdp2", ranks_per_host=1)
    run.start(*hosts)
    run.until_step(25)
    for host in hosts:
        run.kill(host, at_step=0)
    for host in hosts:
        run.restart(host)
    run.until_hosts("h1", "h2")
    run.finish()
    assert [each["number"] for each in run.attempts()] == [1, 2, 3]
    assert [each["reason"] for each in run.attempts()] == ["starts", "starts", "the run has ended"]
