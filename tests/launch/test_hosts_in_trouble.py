"""Hosts of a Ray cluster that are suspended, cut off, slow, or without shared folder: one attempt at a time writes.

`pytest -m slow` runs them; a table of such runs is in benchmarks/experiments/hosts.md.
"""

import os
import signal
from pathlib import Path

import pytest

from tests.launch.cluster import Host, cluster, has_namespaces, partition, until
from tests.launch.hosts import RayRun

pytest.importorskip("ray", reason="ray is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not has_namespaces(), reason="needs root, to make network namespaces"),
]


def test_the_partition_with_the_head_continues_and_the_rest_rejoins_after_healing(folder: Path) -> None:
    with cluster(3, has_head=True) as (head, *hosts):
        run = RayRun(folder, "partition", hosts, head, "multi_node_fsdp2")
        run.start(*hosts)
        run.until_step(run.chance.randrange(5, 20))
        run.events.append(f"h1 cut off from the others at step {run.step()}")
        partition([head, *hosts[1:]], hosts[:1])
        run.until_hosts("h2", "h3")
        run.events.append("healed")
        partition([head, *hosts])
        run.until_hosts("h1", "h2", "h3")
        run.finish()


def test_a_suspended_host_writes_nothing_when_it_wakes_up(folder: Path, hosts: list[Host]) -> None:
    """The lock of the run folder is lost meanwhile, as on a network file system; the sleeper is in a save."""
    head, *others = hosts
    slow_rename = "save.rename step=10 do=sleep seconds=3"
    run = RayRun(folder, "zombie", others, head, "multi_node_ddp", faults=slow_rename)
    run.start(others[0])
    checkpoints = run.run / "checkpoints"
    run.until(lambda: any(checkpoints.glob(".staging-step-000010*/manifest.json")))
    run.events.append("h1 suspended in the save of step 10")
    others[0].send(signal.SIGSTOP)
    (run.run / ".writer.lock").unlink()
    run.join(others[1])
    run.until_hosts("h2")
    run.events.append(f"its rank wakes up at step {run.step()}")
    (rank,) = run.ranks_on(others[0])
    rank.send_signal(signal.SIGCONT)  # its raylet and its worker sleep on
    until(lambda: not rank.is_running() or rank.status() == "zombie", seconds=30)
    run.events.append("its raylet does")
    others[0].send(signal.SIGCONT)
    run.until_hosts("h1", "h2")
    run.finish()


def test_an_attempt_waits_for_a_suspended_host_that_holds_the_run_folder(folder: Path, hosts: list[Host]) -> None:
    head, *others = hosts
    run = RayRun(folder, "sleeper", others, head, "multi_node_fsdp2", stop_seconds=10)
    run.start(others[0])  # rank 0 is here
    run.until_step(3)
    run.join(others[1])
    run.until_hosts("h1", "h2")
    run.until_step(run.step() + 2)
    (first,) = [host for host in others if run.ranks_on(host) and run.ranks_on(host)[0].environ()["RANK"] == "0"]
    run.events.append(f"the host of rank 0, {first.name}, suspended at step {run.step()}")
    first.send(signal.SIGSTOP)
    run.until_logged("waits: a process still writes to")
    run.events.append("wakes up")
    first.send(signal.SIGCONT)
    run.until_hosts(*(host.name for host in others if host is not first))
    run.until_hosts("h1", "h2")
    run.finish()


def test_ranks_end_while_the_shared_folder_is_away_and_the_run_resumes_with_it(folder: Path, hosts: list[Host]) -> None:
    head, *others = hosts
    run = RayRun(folder, "folder-away", others, head, "multi_node_fsdp2")
    run.start(*others)
    run.until_step(run.chance.randrange(11, 25))
    away = run.run.with_name("away")
    run.events.append(f"run folder away at step {run.step()}")
    run.run.rename(away)
    run.run.touch()  # nothing can be written there, nor read
    run.until_logged("waits: the run folder is away")
    run.events.append("back")
    run.run.unlink()
    away.rename(run.run)
    run.until(lambda: len(run.groups) > 1)
    run.finish()


def test_a_stuck_rank_is_named_and_the_run_continues(folder: Path, hosts: list[Host]) -> None:
    head, *others = hosts
    run = RayRun(folder, "slow-rank", others, head, "multi_node_fsdp2", hang_seconds=8)
    run.start(*others)
    run.until_step(run.chance.randrange(5, 20))
    run.events.append(f"rank 1 stopped at step {run.step()}")
    (rank,) = next(ranks for host in others if (ranks := run.ranks_on(host))[0].environ()["RANK"] == "1")
    rank.send_signal(signal.SIGSTOP)
    run.until(lambda: len(run.groups) > 1)
    run.finish()
    assert "no progress for" in run.text() and "No report from rank 1" in run.text()


def test_a_killed_rank_is_named_and_the_same_hosts_continue(folder: Path, hosts: list[Host]) -> None:
    head, *others = hosts
    run = RayRun(folder, "killed-rank", others, head, "multi_node_fsdp2")
    run.start(*others)
    run.until_step(run.chance.randrange(5, 20))
    (rank,) = next(ranks for host in others if (ranks := run.ranks_on(host))[0].environ()["RANK"] == "1")
    run.events.append(f"rank 1 killed at step {run.step()}")
    os.kill(rank.pid, signal.SIGKILL)
    run.until(lambda: len(run.groups) > 1)
    run.finish()


def test_failures_in_a_row_end_the_run(folder: Path, hosts: list[Host]) -> None:
    head, *others = hosts
    fault = "data step=3 rank=1 do=kill"  # in each attempt, before the first checkpoint
    run = RayRun(folder, "max-failures", others, head, "multi_node_ddp", faults=fault, max_failures=2)
    run.start(*others)
    until(lambda: run.command.poll() is not None)
    assert run.command.returncode == 1 and run.num_attempts() == 3, run.text()[-3000:]
    assert "3 failures in a row made no progress; the last one: rank 1 ended with exit code 137: it" in run.text()


_WITHOUT_FINETUNE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "finetune":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


def test_a_host_without_the_package_is_named(folder: Path, hosts: list[Host]) -> None:
    head, *others = hosts
    run = RayRun(folder, "without-package", others, head, "multi_node_ddp")
    (packages := folder / "packages").mkdir()
    (packages / "sitecustomize.py").write_text(_WITHOUT_FINETUNE)
    run.begin_head()
    run.join(others[0])
    run.join(others[1], PYTHONPATH=f"{packages}:{os.environ.get('PYTHONPATH', '')}")
    run.launch()
    until(lambda: run.command.poll() is not None)
    assert run.command.returncode == 2, run.text()[-3000:]
    assert f"error: host {others[1].address}: No module named 'finetune'. Ranks run in the Python" in run.text()


@pytest.mark.parametrize("delay_ms", [1, 20])
def test_links_with_a_delay_make_steps_slower_and_change_no_loss(folder: Path, delay_ms: int) -> None:
    with cluster(2, has_head=True, delay_ms=delay_ms) as (head, *hosts):
        measured = hosts[0].round_trip_ms(hosts[1])
        assert 2 * delay_ms <= measured < 2 * delay_ms + 10
        run = RayRun(folder, f"delay-{delay_ms}-ms", hosts, head, "multi_node_ddp")
        run.events.append(f"round trip {measured:.1f} ms")
        run.start(*hosts)
        outcome = run.finish()
        assert outcome.median_step_seconds > 2 * delay_ms / 1000


def test_links_that_drop_packets_change_no_loss(folder: Path) -> None:
    with cluster(2, has_head=True, delay_ms=1, drop=0.02) as (head, *hosts):
        run = RayRun(folder, "dropped-packets", hosts, head, "multi_node_fsdp2")
        run.events.append("2% of all packets dropped")
        run.start(*hosts)
        run.finish()


def test_a_host_with_a_slow_link_slows_the_run_and_changes_no_loss(folder: Path, hosts: list[Host]) -> None:
    head, *others = hosts
    others[1].limit("8mbit")
    run = RayRun(folder, "slow-link", others, head, "multi_node_fsdp2")
    run.events.append("h2 sends 8 Mbit/s at most")
    run.start(*others)
    run.finish()
