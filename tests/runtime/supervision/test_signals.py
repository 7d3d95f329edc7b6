"""Signals are recorded during a run, and handled as before after it."""

import signal

import pytest

from finetune.runtime.supervision.signals import record_signals


@pytest.fixture(autouse=True)
def in_the_foreground():
    """Handle every signal, even if the tests were started in the background or under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL), signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGHUP, before[0])
    signal.signal(signal.SIGINT, before[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_recorded_and_the_previous_handler_is_restored(number):
    before = signal.getsignal(number)
    with record_signals() as note:
        signal.raise_signal(number)
        assert note.received is number
    assert signal.getsignal(number) is before


def test_the_first_signal_is_recorded_and_a_second_ctrl_c_raises_at_once(capfd):
    with record_signals() as note:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert note.received is signal.SIGTERM
        assert "Press Ctrl-C again to exit now." in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_sigusr1_requests_a_checkpoint_without_a_stop():
    with record_signals() as note:
        signal.raise_signal(signal.SIGUSR1)
    assert note.wants_save
    assert note.received is None


def test_sighup_stays_ignored_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with record_signals() as note:
            signal.raise_signal(signal.SIGHUP)
        assert note.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_sigterm_stops_a_run_that_was_started_with_sigint_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as for a job in the background of a script
    try:
        with record_signals() as note:
            signal.raise_signal(signal.SIGTERM)
        assert note.received is signal.SIGTERM
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_is_recorded_even_if_the_main_thread_cannot_handle_it():
    with record_signals() as note:
        signal.raise_signal(signal.SIGTERM)
        note.received = None  # as if the handler had not run yet
        note.read_wakeup_pipe()
        assert note.received is signal.SIGTERM
        note.read_wakeup_pipe()  # nothing new
