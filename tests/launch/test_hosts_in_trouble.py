"""Hosts that are suspended, cut off, slow, told to leave, or without their shared folder: one attempt at a time writes.

`pytest -m slow` runs them; benchmarks/hosts.py does, too, and makes the table in benchmarks/experiments/hosts.md.
"""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.launch.cluster import Host, cluster, has_namespaces, partition, read_status, until
from tests.launch.hosts import LOST_AFTER, SupervisedRun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not has_namespaces(), reason="needs root, to make network namespaces"),
]


def ranks_on(host: Host) -> list[psutil.Process]:
    """Return the processes of a host that train, by rank."""
    found = [psutil.Process(pid) for pid in host.pids()]
    ranks = [each for each in found if each.cmdline()[1:] and _trains(each.cmdline())]
    return sorted(ranks, key=lambda each: int(each.environ().get("RANK", "0")))


def _trains(words: list[str]) -> bool:
    return words[-4:-1] == ["-m", "finetune", "--config"] and not any("launcher" in word for word in words)


def test_the_larger_partition_continues_and_the_rest_rejoins_after_healing(folder: Path) -> None:
    with cluster(3) as hosts:
        run = SupervisedRun(folder, "partition", hosts, "multi_node_fsdp2", ranks_per_host=1)
        run.start(*hosts)
        run.until_step(run.chance.randrange(5, 30))
        run.said.append("h1 cut off from h2 and h3")
        partition(hosts[:1], hosts[1:])
        run.until_hosts("h2", "h3")
        assert "h1 cannot be reached" in run.attempt()["reason"]
        run.said.append("healed")
        partition(hosts)
        run.until_hosts("h1", "h2", "h3")
        run.finish()


def test_a_suspended_host_writes_nothing_when_it_wakes_up(folder: Path, hosts: list[Host]) -> None:
    """The lock of the run folder is lost meanwhile, as on a network file system; the sleeper is in a save."""
    run = SupervisedRun(
        folder,
        "zombie",
        hosts,
        "multi_node_ddp",
        ranks_per_host=1,
        faults="save.rename step=10 do=sleep seconds=3",
        join_seconds=5,
    )
    run.start(hosts[0])
    checkpoints = run.run / "checkpoints"
    until(lambda: any(checkpoints.glob(".staging-step-000010*/manifest.json")))
    run.said.append("h1 suspended in the save of step 10")
    hosts[0].send(signal.SIGSTOP)
    (run.run / ".writer.lock").unlink()
    run.start(hosts[1])
    run.until_hosts("h2")
    run.said.append("its ranks wake up")
    for rank in ranks_on(hosts[0]):
        rank.send_signal(signal.SIGCONT)  # its supervisor sleeps on
    run.until_said(hosts[0], "writes nothing more")
    run.said.append("its supervisor does")
    hosts[0].send(signal.SIGCONT)
    run.until_hosts("h1", "h2")
    run.finish()
    assert "could not look at the other hosts" in run.text(hosts[0])


def test_an_attempt_waits_for_a_suspended_host_that_holds_the_run_folder(folder: Path, hosts: list[Host]) -> None:
    run = SupervisedRun(folder, "sleeper", hosts, "multi_node_fsdp2", ranks_per_host=1)
    run.start(*hosts)
    run.until_step(run.chance.randrange(5, 40))
    run.said.append("h1 suspended")
    hosts[0].send(signal.SIGSTOP)
    run.until_said(hosts[1], "a process still writes to")
    time.sleep(LOST_AFTER)
    assert not (run.run / "supervisors" / "begun-000002").exists()
    run.said.append("h1 wakes up")
    hosts[0].send(signal.SIGCONT)
    run.until_hosts("h1", "h2")
    run.finish()


def test_a_host_asked_to_leave_saves_and_may_rejoin(folder: Path, hosts: list[Host]) -> None:
    run = SupervisedRun(folder, "leaves", hosts, "multi_node_fsdp2", ranks_per_host=1)
    run.start(*hosts)
    run.until_step(run.chance.randrange(11, 19))
    leaver = hosts[1].programs.pop()
    step = read_status(run.run)["step"]
    run.said.append(f"SIGTERM on h2 at step {step}")
    leaver.send_signal(signal.SIGTERM)
    until(lambda: leaver.poll() is not None)
    assert leaver.returncode == 143
    run.until_hosts("h1")
    assert run.attempt()["reason"] == "h2 leaves" and not hosts[1].pids()
    run.restart(hosts[1])
    run.until_hosts("h1", "h2")
    outcome = run.finish()
    assert outcome.steps_again == 0  # it has saved


def test_ranks_end_while_the_shared_folder_is_unavailable_and_the_run_resumes_with_it(
    folder: Path, hosts: list[Host]
) -> None:
    run = SupervisedRun(folder, "folder-away", hosts, "multi_node_fsdp2", ranks_per_host=1)
    run.start(*hosts)
    run.until_step(run.chance.randrange(5, 40))
    supervisors, away = run.run / "supervisors", run.run / "away"
    run.said.append("shared folder away")
    supervisors.rename(away)
    for host in hosts:
        run.until_said(host, "ends its ranks: the shared folder is away")
    run.said.append("back")
    away.rename(supervisors)
    run.until_hosts("h1", "h2")
    run.finish()


def test_a_stuck_rank_is_named_and_the_run_continues(folder: Path, hosts: list[Host]) -> None:
    run = SupervisedRun(folder, "slow-rank", hosts, "multi_node_fsdp2", ranks_per_host=1, hang_seconds=8)
    run.start(*hosts)
    run.until_step(run.chance.randrange(5, 40))
    run.said.append("rank 1 stopped")
    ranks_on(hosts[1])[0].send_signal(signal.SIGSTOP)
    until(lambda: run.attempt()["number"] > 1)
    run.until_hosts("h1", "h2")
    assert "no progress for" in run.text(hosts[0]) and "No report from rank 1" in run.text(hosts[0])
    run.finish()


@pytest.mark.parametrize("delay_ms", [1, 20])
def test_links_with_a_delay_make_steps_slower_and_change_no_loss(folder: Path, delay_ms: int) -> None:
    with cluster(2, delay_ms=delay_ms) as hosts:
        measured = hosts[0].round_trip_ms(hosts[1])
        assert 2 * delay_ms <= measured < 2 * delay_ms + 10
        run = SupervisedRun(folder, f"delay-{delay_ms}-ms", hosts, "multi_node_ddp", ranks_per_host=1)
        run.said.append(f"round trip {measured:.1f} ms")
        run.start(*hosts)
        outcome = run.finish()
        assert outcome.median_step_seconds > 2 * delay_ms / 1000


def test_links_that_drop_packets_change_no_loss(folder: Path) -> None:
    with cluster(2, delay_ms=1, drop=0.02) as hosts:
        run = SupervisedRun(folder, "dropped-packets", hosts, "multi_node_fsdp2", ranks_per_host=1)
        run.said.append("2% of all packets dropped")
        run.start(*hosts)
        run.finish()


def test_a_host_with_a_slow_link_slows_the_run_and_changes_no_loss(folder: Path, hosts: list[Host]) -> None:
    hosts[1].limit("8mbit")
    run = SupervisedRun(folder, "slow-link", hosts, "multi_node_fsdp2", ranks_per_host=1)
    run.said.append("h2 sends 8 Mbit/s at most")
    run.start(*hosts)
    run.finish()


def test_a_killed_rank_is_named_and_the_same_hosts_continue(folder: Path, hosts: list[Host]) -> None:
    run = SupervisedRun(folder, "killed-rank", hosts, "multi_node_fsdp2", ranks_per_host=1)
    run.start(*hosts)
    run.until_step(run.chance.randrange(5, 40))
    killed = ranks_on(hosts[1])[0]
    run.said.append("rank 1 killed")
    os.kill(killed.pid, signal.SIGKILL)
    until(lambda: run.attempt()["number"] > 1)
    run.until_hosts("h1", "h2")
    run.finish()
    assert run.attempts()[1]["reason"] == "the last attempt failed"
