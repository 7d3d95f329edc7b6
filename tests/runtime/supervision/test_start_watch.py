"""Ranks without a launcher end when one of them dies before the process group exists, whatever ended it."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from finetune.errors import FinetuneError, LostContact, UserError
from finetune.runtime.processes import ELASTIC_VARIABLE
from finetune.runtime.supervision import start_watch
from finetune.runtime.supervision.start_watch import StartWatch
from tests.launching import free_loopback_port

RANK = """
import os, sys, time
from finetune.runtime.supervision import start_watch
with start_watch.watched_start(os.environ):
    while len(start_watch._watch._ranks) < int(sys.argv[1]):
        time.sleep(0.05)
    print("connected", flush=True)
    time.sleep(60)
"""


class Rank:
    """The watch of one rank, in a thread of this process, and what it has been notified of."""

    def __init__(self, rank: int, *, world: int, port: int) -> None:
        self.lost: list[FinetuneError] = []
        self.is_notified = threading.Event()
        self.watch = StartWatch(rank=rank, world=world, address="127.0.0.1", port=port)
        self.watch.on_lost = self.lose

    def lose(self, error: FinetuneError) -> None:
        self.lost.append(error)
        self.is_notified.set()


@pytest.fixture
def quick(monkeypatch):
    for name in ("_GRACE_SECONDS", "_CONNECT_SECONDS", "_TICK_SECONDS"):
        monkeypatch.setattr(start_watch, name, 0.05)


def connected(*ranks: Rank) -> None:
    deadline = time.monotonic() + 20
    while any(len(rank.watch._ranks) < rank.watch._num_others for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def begin(rank: int, *, world: int, port: int) -> subprocess.Popen[str]:
    variables = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = {name: value for name, value in os.environ.items() if name != ELASTIC_VARIABLE} | variables
    command = [sys.executable, "-c", RANK, str(world - 1 if rank == 0 else 1)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_ends_the_others_with_its_name(killed):
    port = free_loopback_port()
    ranks = [begin(rank, world=3, port=port) for rank in range(3)]
    assert [rank.stdout.readline() for rank in ranks] == ["connected\n"] * 3
    ranks[killed].send_signal(signal.SIGKILL)
    for number, rank in enumerate(ranks):
        _, errors = rank.communicate(timeout=30)
        if number != killed:
            assert rank.returncode == 1
            assert errors.count("error:") == 1
            assert f"rank {killed} (process {ranks[killed].pid} on " in errors


def test_the_error_of_one_rank_is_passed_on_to_all(quick):
    port = free_loopback_port()
    ranks = [Rank(rank, world=3, port=port) for rank in range(3)]
    connected(*ranks)
    ranks[1].watch.end(UserError("job.yaml has 1 problem\n  line 3"))
    for rank in (ranks[0], ranks[2]):
        assert rank.is_notified.wait(20)
        (error,) = rank.lost
        assert isinstance(error, UserError) and error.exit_code == 2
        assert str(error).startswith("rank 1 (process ") and str(error).endswith("1 problem\n  line 3")
    assert ranks[1].lost == []


def test_a_rank_0_that_fails_at_once_waits_for_the_others_to_connect(quick):
    port = free_loopback_port()
    first = Rank(0, world=2, port=port)
    failing = threading.Thread(target=first.watch.end, args=(ImportError("libcudart.so.12"),))
    failing.start()
    second = Rank(1, world=2, port=port)
    assert second.is_notified.wait(20)
    (error,) = second.lost
    assert isinstance(error, LostContact)
    assert "rank 0" in str(error) and "ImportError: libcudart.so.12" in str(error)
    failing.join(20)
    assert not failing.is_alive()


def test_the_same_error_on_all_ranks_is_left_to_each_of_them(quick, monkeypatch):
    monkeypatch.setattr(start_watch, "_GRACE_SECONDS", 30.0)
    port = free_loopback_port()
    ranks = [Rank(rank, world=2, port=port) for rank in range(2)]
    connected(*ranks)
    for rank in ranks:
        rank.watch.end(UserError("no such key"))
    assert [rank.lost for rank in ranks] == [[], []]


def test_ranks_that_have_joined_may_end_as_they_like(quick):
    port = free_loopback_port()
    ranks = [Rank(rank, world=3, port=port) for rank in range(3)]
    connected(*ranks)
    for rank in ranks:
        rank.watch.end()
    assert not any(rank.watch._thread.is_alive() for rank in ranks)
    time.sleep(0.2)
    assert [rank.lost for rank in ranks] == [[], [], []]


def test_programs_that_are_not_ranks_of_this_launch_change_nothing(quick):
    port = free_loopback_port()
    ranks = [Rank(rank, world=2, port=port) for rank in range(2)]
    connected(*ranks)
    address = ranks[0].watch._address
    for sent in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b'["failed", "x"]\n',
        b'["hello", "finetune 1 2", "x"]\n',
        b"[" * 9000 + b"\n",
    ):
        with socket.create_connection(address) as stranger:
            stranger.sendall(sent)
    other = Rank(1, world=3, port=port)  # of another launch
    time.sleep(0.5)
    assert [rank.lost for rank in (*ranks, other)] == [[], [], []]
    for rank in (other, *ranks):
        rank.watch.end()


def test_a_port_that_is_in_use_only_switches_the_watch_off(quick):
    port = free_loopback_port()
    ranks = [Rank(0, world=2, port=port) for _ in range(2)]
    deadline = time.monotonic() + 20
    while sum(rank.watch._thread.is_alive() for rank in ranks) != 1:  # either of them has the port
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for rank in ranks:
        rank.watch.end()
        assert rank.lost == []


def test_ranks_of_a_launcher_are_not_watched():
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with start_watch.watched_start({**variables, ELASTIC_VARIABLE: "x"}):
        assert start_watch._watch is None
    with start_watch.watched_start(variables):
        assert start_watch._watch is not None
    assert start_watch._watch is None
