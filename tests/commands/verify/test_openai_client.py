"""Servers that are slow, broken or serve something else: one message each."""

import contextlib
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from finetune.commands.verify.expected import ServingError
from finetune.commands.verify.openai_client import OpenAIModel
from finetune.export.engines import ENGINES
from tests.serving_server import running

MODELS = {"data": [{"id": "model"}]}


def client(url: str, *, name: str = "openai", seconds: float = 20.0) -> OpenAIModel:
    return OpenAIModel(ENGINES[name], url, timeout_seconds=seconds)


def message_of(answers: dict[str, Any], tmp_path, *, seconds: float = 20.0, model: str | None = None) -> str:
    """Return the error of an answer to a conversation, from a server with these answers by path."""

    def answer(path: str, _: dict[str, Any]) -> Any:
        made = {"/v1/models": MODELS, **answers}[path]
        return made() if callable(made) else made

    with running(answer) as url, pytest.raises(ServingError) as caught:
        served = client(url, seconds=seconds)
        served.choose(model, folder=tmp_path / "final")
        served.answer([{"role": "user", "content": "Hi"}], max_tokens=4)
    assert caught.value.exit_code == 2
    return str(caught.value)


CHAT = "/v1/chat/completions"


def test_a_server_that_is_not_there_is_one_message_with_the_remedy(tmp_path):
    with pytest.raises(ServingError, match=r"cannot be reached: .*--engine vllm:URL\."):
        client("http://127.0.0.1:9/v1", name="vllm").choose(None, folder=tmp_path)


def test_a_slow_server_ends_with_the_time_limit(tmp_path):
    started = time.monotonic()
    text = message_of({CHAT: lambda: time.sleep(1.5)}, tmp_path, seconds=0.4)
    assert "did not answer /chat/completions within 0.4 s" in text
    assert time.monotonic() - started < 5


TWO_MODELS = {"/v1/models": {"data": [{"id": "a"}, {"id": "b"}]}}


@pytest.mark.parametrize(
    ("answers", "model", "message"),
    [
        ({CHAT: 500}, None, "answered /chat/completions with 500"),
        ({CHAT: b'{"choices": ['}, None, 'with invalid JSON: {"choices": ['),
        ({"/v1/models": b"<html>"}, None, "with invalid JSON: <html>"),
        ({CHAT: {"model": "model"}}, None, 'without `choices.0.message.content`: {"model": "model"}'),
        ({CHAT: []}, None, "is not a JSON object"),
        ({"/v1/models": {"data": [1]}}, None, "does not list its models"),
        ({CHAT: {"model": "other", "choices": []}}, None, "the model `other`, although `model` was requested"),
        (TWO_MODELS, None, "serves `a`, `b`, and not the model in "),
        (TWO_MODELS, "c", "serves `a`, `b`, and not `c`"),
    ],
)
def test_a_broken_answer_and_another_model_are_shown(tmp_path, answers, model, message):
    assert message in message_of(answers, tmp_path, model=model)


@pytest.mark.parametrize(
    "scores", [[], {"content": 3}, {"content": [{}]}, {"content": [[1]]}, {"token_logprobs": [10**400]}, "none"]
)
def test_log_probabilities_that_are_not_numbers_are_refused(scores, tmp_path):
    choice = {"message": {"content": "a"}, "logprobs": scores or [1]}
    assert "log-probabilities that are not numbers" in message_of({CHAT: {"choices": [choice]}}, tmp_path)


def test_the_model_of_the_folder_is_chosen_among_several(tmp_path):
    listed = {"data": [{"id": "base"}, {"id": "support", "root": str(tmp_path / "final")}]}
    with running(lambda path, body: listed) as url:
        served = client(url)
        served.choose(None, folder=tmp_path / "final")
    assert served.name == "support"


def test_a_server_without_endpoints_for_tokens_and_rows_is_reported_as_not_compared(tmp_path):
    def answer(path: str, body: dict[str, Any]) -> Any:
        return MODELS if path == "/v1/models" else 404

    with running(answer) as url:
        served = client(url)
        served.choose(None, folder=tmp_path)
        assert served.text_ids("a") is None
        assert served.log_probabilities([1, 2]) is None
        assert served.ends_answer(0, ids=[1, 2]) is None
    assert sorted(served.not_supported) == ["log-probabilities of rows", "tokens of texts", "tokens that end an answer"]


def test_a_server_that_ignores_forced_tokens_is_not_asked_for_stops(tmp_path):
    completion = {"model": "model", "choices": [{"text": "x", "finish_reason": "length"}]}
    with running(lambda path, body: MODELS if path == "/v1/models" else completion) as url:
        served = client(url)
        served.choose(None, folder=tmp_path)
        assert served.ends_answer(0, ids=[1, 2, 3]) is None
    assert served.not_supported["tokens that end an answer"] == "it ignores `logit_bias`"


def test_arguments_of_the_template_are_sent(tmp_path):
    bodies: list[dict[str, Any]] = []

    def answer(path: str, body: dict[str, Any]) -> Any:
        bodies.append(body)
        choice = {"message": {"content": "Hi"}, "finish_reason": "stop"}
        return MODELS if path == "/v1/models" else {"choices": [choice], "usage": {"prompt_tokens": 3}}

    with running(answer) as url:
        served = client(url)
        served.choose(None, folder=tmp_path)
        served.prepare({"enable_thinking": False}, num_tokens=8)
        answered = served.answer([{"role": "user", "content": "Hi"}], max_tokens=4)
    assert json.loads(json.dumps(bodies[-1]))["chat_template_kwargs"] == {"enable_thinking": False}
    assert (answered.text, answered.is_complete, answered.num_prompt_tokens) == ("Hi", True, 3)


@contextlib.contextmanager
def answering(content: bytes, *, seconds_per_byte: float = 0.0):
    """Yield the URL of a server that sends these bytes to each request, and the list of what it was sent."""
    listener, received = socket.create_server(("127.0.0.1", 0)), []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                received.append(connection.recv(4096).decode())
                for start in range(0, len(content), 1 if seconds_per_byte else len(content)):
                    connection.sendall(content[start : start + (1 if seconds_per_byte else len(content))])
                    time.sleep(seconds_per_byte)
                connection.close()

    threading.Thread(target=serve, daemon=True).start()
    with listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1", received


def test_a_redirect_is_not_followed_and_the_key_goes_to_the_given_server_alone(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "my-key")
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}") as (other, stolen):
        moved = f"HTTP/1.1 307 Moved\r\nLocation: {other}/models\r\nContent-Length: 0\r\n\r\n"
        with answering(moved.encode()) as (url, received), pytest.raises(ServingError, match=f"redirect to {other}"):
            client(url).choose(None, folder=Path("final"))
    assert "Bearer my-key" in received[0] and stolen == []


def test_a_body_that_never_ends_is_cut_off_at_the_time_limit():
    """The server sends a byte now and then, which no time limit of the socket notices."""
    drip = b"HTTP/1.1 500 E\r\n\r\n" + b" " * 100
    late = r"did not answer /models within 0\.5 s"
    with answering(drip, seconds_per_byte=0.02) as (url, _), pytest.raises(ServingError, match=late):
        client(url, seconds=0.5).choose(None, folder=Path("final"))


def test_an_answer_of_200_mb_is_refused_by_its_size_at_once():
    started = time.monotonic()
    large = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (200 << 20) + b" " * (200 << 20)
    with answering(large) as (url, _), pytest.raises(ServingError, match="more than 64 MB in one answer"):
        client(url).choose(None, folder=Path("final"))
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("url", ["http://", "http://host:port/v1", "http://[::1/v1", "ftp://host/v1", ""])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(ServingError, match="write a URL such as http://"):
        client(url)
