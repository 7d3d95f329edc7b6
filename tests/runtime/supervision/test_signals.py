"""Signals are recorded during a run, and handled as before after it; spot notices come from a local server."""

import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from finetune.runtime.supervision.signals import BASE_VARIABLE, SpotNotice, record_signals


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


class Service:
    """Responds by (method, path), and requires the headers of the cloud."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], str] = {}
        self.headers: list[dict[str, str]] = []


@pytest.fixture
def service(monkeypatch) -> Iterator[Service]:
    known = Service()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known.headers.append({name.lower(): value for name, value in self.headers.items()})
            answer = known.answers.get((self.command, self.path))
            self.send_response(200 if answer is not None else 404)
            self.end_headers()
            self.wfile.write((answer or "").encode())

        do_PUT = do_GET  # noqa: N815  # the name that http.server looks for

        def log_message(self, *words: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    monkeypatch.setenv(BASE_VARIABLE, f"http://127.0.0.1:{server.server_port}")
    yield known
    server.shutdown()
    server.server_close()


def test_aws_answers_404_until_the_machine_is_to_be_taken(service):
    messages: list[str] = []
    notice = SpotNotice("aws", log=messages.append)
    service.answers["PUT", "/latest/api/token"] = "a token"
    assert not notice.poll()
    service.answers["GET", "/latest/meta-data/spot/instance-action"] = '{"action": "terminate", "time": "..."}'
    assert notice.poll()
    assert notice()
    assert service.headers[0]["x-aws-ec2-metadata-token-ttl-seconds"] == "300"
    assert service.headers[-1]["x-aws-ec2-metadata-token"] == "a token"
    assert messages == []


def test_a_gcp_preemption_is_recognized_by_its_answer(service):
    notice = SpotNotice("gcp", log=print)
    for answer, expected in (("FALSE", False), ("TRUE", True)):
        service.answers["GET", "/computeMetadata/v1/instance/preempted"] = answer
        assert notice.poll() is expected
    assert service.headers[-1]["metadata-flavor"] == "Google"


def test_azure_names_the_machines_of_an_event_and_only_ours_counts(service):
    events = "/metadata/scheduledevents?api-version=2020-07-01"
    service.answers["GET", "/metadata/instance/compute/name?api-version=2021-02-01&format=text"] = "mine_0"
    notice = SpotNotice("azure", log=print)
    for written, expected in (
        ('{"Events": []}', False),
        ('{"Events": [{"EventType": "Reboot", "Resources": ["mine_0"]}]}', False),
        ('{"Events": [{"EventType": "Preempt", "Resources": ["other_1"]}]}', False),
        ('{"Events": [{"EventType": "Preempt", "Resources": ["other_1", "mine_0"]}]}', True),
    ):
        service.answers["GET", events] = written
        assert notice.poll() is expected
    assert service.headers[-1]["metadata"] == "true"


def test_a_metadata_service_that_does_not_respond_causes_one_warning(monkeypatch):
    monkeypatch.setenv(BASE_VARIABLE, "http://127.0.0.1:9")
    messages: list[str] = []
    notice = SpotNotice("gcp", log=messages.append)
    assert [notice.poll(), notice.poll()] == [False, False]
    assert len(messages) == 1
    assert "the metadata service of gcp does not respond" in messages[0]
