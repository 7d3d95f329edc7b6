"""Connections between hosts, here over this host's own loopback."""

import socket

import pytest

from finetune.errors import UserError
from finetune.launch.supervisor.network import Listener, Reachability, can_connect, free_port, own_address


def test_a_listener_is_reached_until_it_is_closed() -> None:
    listener = Listener()
    place = ("127.0.0.1", listener.port)
    assert can_connect([place, ("127.0.0.1", free_port())], seconds=1) == {place}
    listener.answer()
    listener.close()
    assert can_connect([place], seconds=1) == set()


def test_a_host_counts_as_reached_for_a_while_after_the_last_connection() -> None:
    now = 100.0
    reachability, listener = Reachability(lost_after_seconds=5, clock=lambda: now), Listener()
    others = {"b": ("127.0.0.1", listener.port), "c": ("127.0.0.1", free_port())}
    assert reachability.update(others) == ("b",)
    listener.close()
    now = 104.9
    assert reachability.update(others) == ("b",)
    now = 105.0
    assert reachability.update(others) == ()


def test_an_address_is_that_of_the_named_interface() -> None:
    assert own_address("lo") == ("127.0.0.1", "lo")
    with pytest.raises(UserError, match=r"this host has no `eth99`.*lo \(127.0.0.1\)"):
        own_address("eth99")


def test_a_free_port_can_be_bound() -> None:
    with socket.create_server(("", free_port())) as bound:
        assert bound.getsockname()[1] > 0
