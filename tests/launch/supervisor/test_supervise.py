"""Clusters whose hosts die, sleep, lose one another or their folder at random: one attempt writes at a time."""

import json
from pathlib import Path

import pytest

from finetune.launch.supervisor.members import Attempt
from finetune.launch.supervisor.supervise import RunStatus, read_run_status
from tests.launch.supervisor.simulation import FakeHost, Simulation

SEEDS = [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 200))]


def disturb(cluster: Simulation) -> None:
    """Do something to a host, or to all."""
    host = cluster.chance.choice(cluster.hosts)
    what = cluster.chance.choice(
        ["kill", "restart", "sleep", "sleep", "cut", "heal", "folder", "leave", "fail", "deaf", "swap"]
    )
    cluster.lines.append(f"{cluster.now:.0f} {what} {host.name}")
    if what == "kill":
        cluster.kill(host)
    elif what == "restart":
        restart(cluster, host)
    elif what == "sleep":
        host.asleep_until = cluster.now + cluster.chance.randrange(2, 60)
    elif what in ("cut", "heal"):
        for each in cluster.hosts:
            each.group = cluster.chance.randrange(2) if what == "cut" else 0
    elif what == "folder":
        cluster.hide_folder() if cluster.shared.exists() and not (cluster.run / "away").exists() else None
    elif what == "leave" and host.supervisor is not None:
        host.supervisor.leave()
    elif what == "fail":
        cluster.fail(host)
    elif what == "swap":
        swap(cluster, host)
    elif what == "deaf" and host.ranks:
        host.ranks[-1].is_deaf = True
    if what != "folder":
        cluster.show_folder()


def swap(cluster: Simulation, host: FakeHost) -> None:
    """Leave the host alone, and have it sleep while the others run an attempt without it: whole, it wakes up."""
    cluster.show_folder()
    others = [each for each in cluster.hosts if each is not host]
    for each in others:
        cluster.kill(each)
    host.asleep_until = 0.0
    for _ in range(25):
        cluster.tick()
    host.asleep_until = cluster.now + 40
    for each in others:
        restart(cluster, each)


def restart(cluster: Simulation, host: FakeHost) -> None:
    if host.supervisor is None:
        cluster.kill(host)
        cluster.start(host)


@pytest.mark.parametrize("seed", SEEDS)
def test_only_one_attempt_writes_at_a_time_and_the_run_continues(tmp_path: Path, seed: int) -> None:
    cluster = Simulation(
        tmp_path, num_hosts=2 + seed % 3, least=1 + (seed % 5 == 4), seed=seed, has_locks=seed % 2 == 0
    )
    for host in cluster.hosts:
        cluster.start(host)
    for _ in range(25):
        for _ in range(cluster.chance.randrange(1, 40)):
            cluster.tick()
        disturb(cluster)
    settle(cluster)
    assert cluster.written == sorted(cluster.written), cluster.lines
    assert cluster.written and cluster.running()


def settle(cluster: Simulation) -> None:
    """Heal everything; fail unless all hosts train together after a while, in one attempt."""
    cluster.show_folder()
    for host in cluster.hosts:
        host.group, host.asleep_until = 0, 0.0
        for ranks in host.ranks:
            if ranks.is_deaf:
                ranks.kill()
    for _ in range(30):  # a host that was told to leave does
        cluster.tick()
    for host in cluster.hosts:
        restart(cluster, host)
    for _ in range(120):
        cluster.tick()
    running, step = cluster.running(), cluster.step
    cluster.tick()
    assert len({ranks.attempt for ranks in running}) == 1 and cluster.step == step + 1, cluster.lines[-60:]
    assert len(running) == len(cluster.hosts), cluster.lines[-60:]


def test_a_host_that_wakes_up_is_not_let_write(tmp_path: Path) -> None:
    """Its ranks train on their own, and their supervisor sleeps on: what the mark of a newer attempt is for."""
    cluster = Simulation(tmp_path, num_hosts=2, least=1, seed=1, has_locks=False)
    first, second = cluster.hosts
    cluster.start(first)
    for _ in range(30):
        cluster.tick()
    assert cluster.written and cluster.running()[0].attempt == 1
    first.asleep_until = cluster.now + 60
    cluster.start(second)
    for _ in range(40):
        cluster.tick()
    assert cluster.written[-1] == 2
    supervisor, first.supervisor, first.asleep_until = first.supervisor, None, 0.0
    cluster.tick()
    assert cluster.refused == [1]
    first.supervisor, woken = supervisor, len(cluster.lines)
    settle(cluster)
    reasons = [line.split(": ")[-1] for line in cluster.lines[woken:] if "attempt" in line]
    assert set(reasons) == {
        "starts; this host is a spare",
        "h0 joined",
    }  # it has not displaced the other, of which it knew nothing
    assert cluster.written == sorted(cluster.written)


def test_the_run_ends_once_for_all(tmp_path: Path) -> None:
    cluster = Simulation(tmp_path, num_hosts=3, least=1, seed=1, has_locks=True)
    cluster.steps_wanted = 30
    for host in cluster.hosts:
        cluster.start(host)
    for _ in range(80):
        cluster.tick()
    assert [host.exit_code for host in cluster.hosts] == [0, 0, 0]
    assert not list(cluster.shared.glob("host-*.json"))


def test_an_attempt_waits_while_a_sleeping_host_holds_the_run_folder(tmp_path: Path) -> None:
    cluster = Simulation(tmp_path, num_hosts=2, least=1, seed=1, has_locks=True)
    for host in cluster.hosts:
        cluster.start(host)
    for _ in range(30):
        cluster.tick()
    cluster.hosts[0].asleep_until = cluster.now + 100
    for _ in range(50):
        cluster.tick()
    waits = [line for line in cluster.lines if "a process still writes to" in line]
    assert len(waits) == 1 and {ranks.attempt for ranks in cluster.running()} == {1}
    for _ in range(100):
        cluster.tick()
    assert {ranks.attempt for ranks in cluster.running()} > {1} or cluster.written[-1] > 1
    settle(cluster)


ATTEMPT = Attempt(3, ("a", "b"), ("10.0.0.1", "10.0.0.2"), 29500, "starts")


def write_status(folder: Path, *, code: int, launch: str) -> None:
    error = {"rank": 0, "type": "UserError", "message": "there is no such key"}
    (folder / "status.json").write_text(json.dumps({"exit_code": code, "error": error, "launch": launch}))


def test_only_a_mistake_of_this_attempt_counts(tmp_path: Path) -> None:
    for name in ("step-000020", "step-000100", "step-7 (copy)", ".bad-step-000200"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert read_run_status(tmp_path, ATTEMPT) == RunStatus(100)
    write_status(tmp_path, code=2, launch="10.0.0.1:29500:0")
    assert read_run_status(tmp_path, ATTEMPT) == RunStatus(100, "there is no such key")
    assert read_run_status(tmp_path, None) == RunStatus(100)
    write_status(tmp_path, code=2, launch="10.0.0.9:29500:0")
    assert read_run_status(tmp_path, ATTEMPT) == RunStatus(100)
    write_status(tmp_path, code=1, launch="10.0.0.1:29500:0")
    assert read_run_status(tmp_path, ATTEMPT) == RunStatus(100)


def test_a_damaged_status_file_is_ignored_by_the_supervisor(tmp_path: Path) -> None:
    for text in ("", "[]", "{}", '{"exit_code": 2, "error": 3, "launch": null}'):
        (tmp_path / "status.json").write_text(text)
        assert read_run_status(tmp_path, ATTEMPT) == RunStatus(0)
