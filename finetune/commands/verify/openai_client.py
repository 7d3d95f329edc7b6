"""A client of the OpenAI protocol, as vLLM, SGLang, Ollama and others speak it."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from finetune.commands.verify.expected import Prompt, ServedAnswer, ServingError
from finetune.data.templates.rendering import Arguments
from finetune.export.engines import Engine
from finetune.runtime.files.read import parse_json

_MAX_BYTES = 64 << 20
_UNSUPPORTED = frozenset({400, 404, 405, 415, 422, 501})
"""The statuses of a server that does not offer what was requested; of an unknown one, 500 may mean that, too."""

_MAX_NAMED = 10
_FORCED = 100
"""The largest `logit_bias` of the protocol."""


class _Unsupported(ServingError):
    """The server refuses a request as one that it does not offer."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class OpenAIModel:
    """A model on a server that speaks the OpenAI protocol."""

    def __init__(self, engine: Engine, url: str, *, timeout_seconds: float) -> None:
        try:
            self._origin = urlsplit(url)
            is_valid = self._origin.scheme in ("http", "https") and self._origin.hostname and self._origin.port != 0
        except ValueError:  # of the port or an IPv6 address
            is_valid = False
        if not is_valid:
            raise ServingError(f"--engine {engine.name}:{url}: write a URL such as http://localhost:8000/v1.")
        self.title = f"{engine.title} at {url}"
        self.name = ""
        self.not_supported: dict[str, str] = {}  # by feature that is not offered, the server's response
        self._engine = engine
        self._url = url.rstrip("/")
        self._timeout = timeout_seconds
        self.dtype: str | None = None
        self._arguments: Arguments = {}
        self._is_bias_heeded: bool | None = None

    def choose(self, name: str | None, *, folder: Path) -> None:
        """Request this model from now on; without a name, the only one, or the one that is called as the folder.

        Raises ServingError if the server does not serve it, or several models.
        """
        listed = self._request("/models")
        models = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(models, list) or not all(isinstance(model, dict) and "id" in model for model in models):
            raise ServingError(f"{self.title} does not list its models at {self._url}/models: {_shortened(listed)}.")
        names = [str(model["id"]) for model in models]
        own = {str(folder), folder.name, folder.parent.name}
        if name is None and len(names) > 1:  # by Ollama's tag or vLLM's folder
            roots = {str(model["id"]): str(model.get("root")) for model in models}
            candidates = [each for each in names if own & {each.removesuffix(":latest"), roots[each]}]
        else:
            candidates = names if name is None else [name]
        if len(candidates) != 1 or candidates[0] not in names:
            requested = f"`{name}`" if name is not None else f"the model in {folder}"
            served = ", ".join(f"`{each}`" for each in names[:_MAX_NAMED]) or "no model"
            raise ServingError(
                f"{self.title} serves {served}, and not {requested}. Give the name of a served model with --model. An "
                "adapter that is missing from the list was refused when the server started: see its log."
            )
        self.name = candidates[0]

    def prepare(self, arguments: Arguments, *, num_tokens: int) -> None:
        """Send these arguments of the chat template with every conversation."""
        self._arguments = arguments

    def prompt_ids(self, prompt: Prompt) -> Sequence[int] | None:
        """Return the tokens of the rendered prompt, from the server's endpoint for tokens."""
        if isinstance(prompt, str):
            return self.text_ids(prompt)
        body = {"messages": list(prompt), "add_generation_prompt": True, **self._template_arguments()}
        return self._tokens("rendered tokens", body)

    def text_ids(self, text: str) -> Sequence[int] | None:
        """Return the tokens of a text, from the server's endpoint for tokens."""
        return self._tokens("tokens of texts", {"prompt": text, "add_special_tokens": True})

    def log_probabilities(self, ids: Sequence[int]) -> Sequence[float] | None:
        """Return the log-probability of each token but the first, from a completion that repeats its prompt."""
        if not self._engine.takes_token_ids:
            self.not_supported.setdefault("log-probabilities of rows", "it takes no token ids")
            return None
        body = {"prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "echo": True, "logprobs": 1}
        answer = self._offered("log-probabilities of rows", "/completions", body)
        if answer is None:
            return None
        values = self._part(answer, "choices", 0, "logprobs", "token_logprobs")
        if not isinstance(values, list) or len(values) < len(ids):
            self.not_supported.setdefault("log-probabilities of rows", "it does not repeat the prompt (`echo`)")
            return None
        return self._numbers({"token_logprobs": values[1 : len(ids)]})

    def ends_answer(self, token: int, *, ids: Sequence[int]) -> bool | None:
        """Return whether an answer ends at this token, found by forcing it with a `logit_bias`."""
        if not self._engine.takes_token_ids:
            return None
        if self._is_bias_heeded is None:  # a token of the prompt is an ordinary one; the answer then consists of it
            biases = ({}, *({token: _FORCED} for token in ids[1 :: max(1, len(ids) // 5)]))
            completions = {self._completion(ids, bias) for bias in biases}
            self._is_bias_heeded = None not in completions and len(completions) > 1
            if not self._is_bias_heeded:
                self.not_supported.setdefault("tokens that end an answer", "it ignores `logit_bias`")
        if not self._is_bias_heeded:
            return None
        completion = self._completion(ids, {token: _FORCED})
        return None if completion is None else completion[1] == "stop"

    def answer(self, prompt: Prompt, *, max_tokens: int) -> ServedAnswer:
        """Return the greedy answer."""
        body: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0}
        if isinstance(prompt, str):
            answer = self._complete("/completions", {"prompt": prompt, "logprobs": 1, **body})
            text = self._part(answer, "choices", 0, "text")
        else:
            messages = {"messages": list(prompt), "logprobs": True, "top_logprobs": 1, **self._template_arguments()}
            answer = self._complete("/chat/completions", {**messages, **body})
            text = self._part(answer, "choices", 0, "message", "content") or ""
        choice = answer["choices"][0]
        usage = answer.get("usage")
        return ServedAnswer(
            str(text),
            is_complete=choice.get("finish_reason") == "stop",
            num_prompt_tokens=usage.get("prompt_tokens") if isinstance(usage, dict) else None,
            log_probabilities=self._numbers(choice.get("logprobs") or {}),
        )

    def _numbers(self, scores: Any) -> tuple[float, ...]:
        """Return the log-probabilities of a completion or an answer; raises ServingError if they are not numbers."""
        try:
            values = scores.get("token_logprobs") or [token["logprob"] for token in scores.get("content") or ()]
            return tuple(map(float, values))
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            raise ServingError(
                f"{self.title} answered with log-probabilities that are not numbers: {error}."
            ) from error

    def _template_arguments(self) -> dict[str, Any]:
        return {"chat_template_kwargs": dict(self._arguments)} if self._arguments else {}

    def _tokens(self, title: str, body: Mapping[str, Any]) -> Sequence[int] | None:
        path = self._engine.tokenize_path
        if path is None:
            self.not_supported.setdefault(title, "it has no endpoint for tokens")
            return None
        answer = self._offered(title, path, body, is_root=True)
        tokens = answer.get("tokens") if answer is not None else None
        if answer is not None and not (isinstance(tokens, list) and all(isinstance(token, int) for token in tokens)):
            raise ServingError(f"{self.title}: {path} answered without `tokens`: {_shortened(answer)}.")
        return tokens

    def _completion(self, ids: Sequence[int], bias: Mapping[int, float]) -> tuple[str, str] | None:
        """Return text and finish reason of two tokens; None if the server refuses the bias."""
        body: dict[str, Any] = {"prompt": list(ids), "max_tokens": 2, "temperature": 0.0}
        if bias:
            body["logit_bias"] = {str(token): value for token, value in bias.items()}
        answer = self._offered("tokens that end an answer", "/completions", body)
        if answer is None:
            return None
        return str(self._part(answer, "choices", 0, "text")), str(self._part(answer, "choices", 0, "finish_reason"))

    def _offered(self, title: str, path: str, body: Mapping[str, Any], *, is_root: bool = False) -> Any:
        """Return the answer; None if the server does not offer it, which is recorded and not requested again."""
        if title in self.not_supported:
            return None
        try:
            return self._complete(path, body, is_root=is_root)
        except _Unsupported as error:
            self.not_supported[title] = f"{path} answered {error.status}"
            return None

    def _complete(self, path: str, body: Mapping[str, Any], *, is_root: bool = False) -> Any:
        answer = self._request(path, {"model": self.name, **body}, is_root=is_root)
        if not isinstance(answer, dict):
            raise ServingError(f"{self.title}: {path} answered {_shortened(answer)}, which is not a JSON object.")
        served = answer.get("model", self.name)
        if served != self.name:
            raise ServingError(
                f"{self.title} answered with the model `{served}`, although `{self.name}` was requested. Serve only "
                "this model, or remove what routes requests to another one."
            )
        return answer

    def _request(self, path: str, body: Mapping[str, Any] | None = None, *, is_root: bool = False) -> Any:
        """Return the JSON that the server answers; raises _Unsupported, or ServingError with the remedy."""
        base = self._origin.path.rstrip("/")
        target = f"{base.removesuffix('/v1') if is_root else base}{path}"
        try:
            response, content = self._exchange(target, None if body is None else json.dumps(body).encode())
        except TimeoutError as error:
            raise ServingError(
                f"{self.title} did not answer {path} within {self._timeout:g} s. Wait until the server has loaded "
                "the model, or allow more time with --timeout."
            ) from error
        except (HTTPException, OSError) as error:
            raise ServingError(
                f"{self.title} cannot be reached: {error}. Start the server (`finetune export --for "
                f"{self._engine.name}` writes its command), or give its address: --engine {self._engine.name}:URL."
            ) from error
        if HTTPStatus.MULTIPLE_CHOICES <= response.status < HTTPStatus.BAD_REQUEST:
            raise ServingError(
                f"{self.title} answered {path} with a redirect to {response.headers['Location']}, which is not "
                f"followed: the key and the answers belong to this address. Give the server's own address: --engine "
                f"{self._engine.name}:URL."
            )
        if response.status >= HTTPStatus.BAD_REQUEST:
            reason = f"{response.status} {response.reason}: {_shortened(content.decode(errors='replace'))}"
            message = f"{self.title} answered {path} with {reason}. See the server's log."
            if response.status in _UNSUPPORTED or (response.status == 500 and self._engine.name == "openai"):
                raise _Unsupported(message, status=response.status)
            raise ServingError(message)
        try:
            return parse_json(content)
        except ValueError as error:
            raise ServingError(
                f"{self.title} answered {path} with invalid JSON: {_shortened(content.decode(errors='replace'))}. "
                "Give the URL of an OpenAI-compatible API, which mostly ends in /v1."
            ) from error

    def _exchange(self, target: str, body: bytes | None) -> tuple[HTTPResponse, bytes]:
        """Return response and content of one request, without a proxy; raises TimeoutError, HTTPException, OSError."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        connect = HTTPSConnection if self._origin.scheme == "https" else HTTPConnection
        ends_at, content = time.monotonic() + self._timeout, b""
        with closing(connect(self._origin.hostname or "", self._origin.port, timeout=self._timeout)) as connection:
            connection.request("GET" if body is None else "POST", target, body, headers)
            response = connection.getresponse()
            while chunk := response.read1():  # a server may send byte after byte, and many of them
                content += chunk
                if time.monotonic() > ends_at:
                    raise TimeoutError
                if len(content) > _MAX_BYTES:
                    raise ServingError(f"{self.title} sends more than {_MAX_BYTES >> 20} MB in one answer.")
        return response, content

    def _part(self, answer: Any, *path: str | int) -> Any:
        part = answer
        for step in path:
            try:
                part = part[step]
            except (LookupError, TypeError) as error:
                name = ".".join(map(str, path))
                raise ServingError(f"{self.title} answered without `{name}`: {_shortened(answer)}.") from error
        return part


def _shortened(value: Any) -> str:
    text = " ".join((value if isinstance(value, str) else json.dumps(value)).split())
    return text if len(text) <= 200 else f"{text[:200]}..."
