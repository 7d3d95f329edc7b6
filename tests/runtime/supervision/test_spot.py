"""The clouds' spot notices, from a local server that responds as documented."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from finetune.runtime.supervision.spot import BASE_VARIABLE, SpotNotice


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
