"""A process that waits for others that never come says for whom, and that RANK may be left over."""

import socket
import sys
import threading

import pytest
import torch.distributed as dist

from finetune.errors import StrategyError
from finetune.runtime.distributed import reported_wait
from finetune.runtime.supervision.exit import is_broken_collective


@pytest.fixture
def left_over(monkeypatch):
    """RANK and the others as a launcher of three processes has set them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        yield port


def test_a_wait_is_reported_with_address_ranks_and_variables(left_over, monkeypatch):
    written, said = threading.Event(), []
    monkeypatch.setattr(sys.stderr, "write", lambda text: (said.append(text), written.set()))
    with reported_wait(seconds=0.0):
        assert written.wait(10.0)
    text = "".join(said)
    for part in (f"127.0.0.1:{left_over}", "the others of 3 processes", "RANK=0 and WORLD_SIZE=3"):
        assert part in text


def test_a_start_in_time_and_one_process_report_nothing(left_over, monkeypatch, capfd):
    others = set(threading.enumerate())
    with reported_wait(seconds=30.0):
        pass
    monkeypatch.setenv("WORLD_SIZE", "1")
    with reported_wait(seconds=0.0):
        pass
    assert capfd.readouterr().err == ""
    started = set(threading.enumerate()) - others
    assert [thread for thread in started if isinstance(thread, threading.Timer) and not thread.finished.is_set()] == []


def test_a_port_in_use_names_the_port_and_the_variables(left_over):
    message = rf"127\.0\.0\.1:{left_over}: the port .*RANK=0 and WORLD_SIZE=3"
    with pytest.raises(StrategyError, match=message) as error, reported_wait():
        dist.TCPStore("127.0.0.1", int(left_over), 3, is_master=True)
    assert not is_broken_collective(error.value)
