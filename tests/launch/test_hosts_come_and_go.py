"""A run on a Ray cluster goes on when a host is lost, takes it in again, and ends where an undisturbed one does.

Hosts are network namespaces and talk through gloo: what NCCL does when a host is lost is not seen here. A host that is
lost leaves the network first, so no connection to it is closed, as when a machine loses its power.
"""

import signal
import time
from pathlib import Path

import pytest

from tests.launch.cluster import Host, cluster, has_namespaces, read_status, until
from tests.launch.hosts import LORA, STEPS, RayRun

pytest.importorskip("ray", reason="ray is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not has_namespaces(), reason="needs root, to make network namespaces"),
]


@pytest.mark.parametrize("strategy", ["multi_node_fsdp2", "multi_node_ddp", "multi_node_zero3", "zero2"])
def test_a_host_is_lost_and_returns(folder: Path, hosts: list[Host], strategy: str) -> None:
    head, *others = hosts
    run = RayRun(folder, f"second-host-{strategy}", others, head, strategy)
    run.start(*others)
    run.lose_and_take_back(others[1])
    run.finish()
    assert "is lost; the run continues on the others" in run.text()


def test_the_first_host_is_lost_and_returns(folder: Path, hosts: list[Host]) -> None:
    head, *others = hosts
    run = RayRun(folder, "first-host", others, head, "multi_node_fsdp2", ranks_per_host=2)
    run.start(*others)
    run.lose_and_take_back(others[0])
    run.finish()


def test_one_of_three_hosts_is_lost_and_returns(folder: Path) -> None:
    with cluster(3, has_head=True) as (head, *others):
        run = RayRun(folder, "three-hosts", others, head, "multi_node_ddp")
        run.start(*others)
        run.lose_and_take_back(others[1])
        run.finish()


def test_a_host_that_is_shut_down_saves_first(folder: Path, hosts: list[Host]) -> None:
    """All its processes get SIGTERM, as from an init system; the save takes longer than Ray, which starts again."""
    head, *others = hosts
    slow_saves = "; ".join(f"save.rename step={step} do=sleep seconds=20" for step in range(21, 25))
    run = RayRun(folder, "leaves", others, head, "multi_node_fsdp2", faults=slow_saves, stop_seconds=30)
    run.start(*others)
    run.until_step(21)
    run.events.append(f"SIGTERM on h2 at step {run.step()}, a save takes 20 s")
    others[1].send(signal.SIGTERM)
    until(lambda: not others[1].pids(), seconds=60)
    others[1].kill()
    run.until_hosts("h1")
    run.restart(others[1])
    run.until_hosts("h1", "h2")
    outcome = run.finish()
    assert outcome.steps_again == 0


def test_lora_on_hosts_that_come_and_go(folder: Path, hosts: list[Host]) -> None:
    head, *others = hosts
    run = RayRun(folder, "lora", others, head, "multi_node_fsdp2", model=LORA)
    run.start(*others)
    run.lose_and_take_back(others[1])
    run.finish()


def test_hsdp_has_a_copy_of_the_model_on_each_host(folder: Path, hosts: list[Host]) -> None:
    head, *others = hosts
    run = RayRun(folder, "second-host-hsdp", others, head, "hsdp", ranks_per_host=2)
    run.start(*others)
    run.lose_and_take_back(others[1])
    run.finish()


def test_a_host_is_lost_in_the_middle_of_a_save(folder: Path, hosts: list[Host]) -> None:
    """That of rank 0, which is on the first host in the list of the ranks."""
    head, *others = hosts
    slow_save = "save.manifest step=20 do=sleep seconds=4"
    run = RayRun(folder, "in-a-save", others, head, "multi_node_fsdp2", faults=slow_save)
    run.start(*others)
    staging = run.run / "checkpoints"
    run.until(lambda: any(staging.glob(".staging-step-000020*/*.json")))
    first = next(host for host in others if host.name == read_status(run.run)["host"])
    run.kill(first, at_step=0)
    run.until_hosts(*(host.name for host in others if host is not first))
    run.restart(first)
    outcome = run.finish()
    assert outcome.steps_again >= 9  # resumed from step 10


def test_a_host_is_lost_while_an_attempt_starts(folder: Path, hosts: list[Host]) -> None:
    head, *others = hosts
    run = RayRun(folder, "in-a-start", others, head, "multi_node_fsdp2")
    run.start(*others)
    run.until(lambda: bool(run.ranks_on(others[1])))
    run.events.append("h2 lost while attempt 1 starts")
    others[1].kill()
    run.until_hosts("h1")
    run.restart(others[1])
    run.until_hosts("h1", "h2")
    run.finish()


def test_both_hosts_are_lost_and_return(folder: Path, hosts: list[Host]) -> None:
    head, *others = hosts
    run = RayRun(folder, "both", others, head, "multi_node_fsdp2")
    run.start(*others)
    run.until_step(25)
    for host in others:
        run.kill(host, at_step=0)
    for host in others:
        run.restart(host)
    run.until(lambda: len(run.groups) > 1)
    run.finish()


def test_the_same_command_resumes_after_the_loss_of_the_head(folder: Path, hosts: list[Host]) -> None:
    """The command is lost with it. Ranks train on, until connections to the head are refused: then they save."""
    head, *others = hosts
    slow_steps = "; ".join(f"data step={step} do=sleep seconds=1" for step in range(16, STEPS + 1))
    run = RayRun(folder, "head", others, head, "multi_node_fsdp2", faults=slow_steps)
    run.start(*others)
    run.until_step(15)
    run.events.append(f"head and command lost at step {run.step()}")
    head.kill()
    until(lambda: run.step() >= 20)
    run.events.append(f"the head's host back at step {run.step()}, without Ray")
    head.boot()
    began = time.monotonic()
    until(lambda: all(program.poll() is not None for host in others for program in host.programs))
    for host in others:
        host.kill()  # Ray's agents
        host.boot()
    run.events.append(f"raylets end {time.monotonic() - began:.0f} s later at step {run.step()}, all started again")
    run.log(head).unlink()
    run.start(*others)
    outcome = run.finish()
    assert outcome.steps_again == 0
