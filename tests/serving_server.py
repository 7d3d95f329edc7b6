"""A server that speaks the OpenAI protocol, as vLLM does, and serves a folder with transformers."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

Answer = Callable[[str, dict[str, Any]], Any]
"""From path and body of a request to the answer: JSON, bytes, or an HTTP status."""


class ServedFolder:
    """The model of a folder, with or without an adapter, in the given dtype."""

    def __init__(self, folder: Path, *, name: str = "model", dtype: torch.dtype = torch.float32) -> None:
        self.name = name
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        is_adapter = (folder / "adapter_config.json").is_file()
        config = json.loads((folder / "adapter_config.json").read_text()) if is_adapter else {}
        model = AutoModelForCausalLM.from_pretrained(config.get("base_model_name_or_path", folder), dtype=dtype)
        self.model = (PeftModel.from_pretrained(model, folder) if is_adapter else model).eval().to(dtype)
        ids = GenerationConfig.from_pretrained(folder).eos_token_id
        self.stops = {self.tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])}

    def __call__(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": self.name, "object": "model"}]}
        if body.get("model") != self.name:
            return 404
        if path == "/tokenize":
            return {"tokens": self._ids(body)}
        if path == "/v1/chat/completions":
            ids = self._ids(body)
            answer, scores, reason = self._answer(ids, body)
            content = [{"token": "", "logprob": score} for score in scores]
            message = {"role": "assistant", "content": self.tokenizer.decode(answer, skip_special_tokens=True)}
            choice = {"message": message, "finish_reason": reason, "logprobs": {"content": content}}
            return {"model": self.name, "choices": [choice], "usage": {"prompt_tokens": len(ids)}}
        if path == "/v1/completions":
            ids = body["prompt"] if isinstance(body["prompt"], list) else self.tokenizer(body["prompt"])["input_ids"]
            answer, scores, reason = self._answer(ids, body)
            before = [None, *self._scores(ids, 0)] if body.get("echo") else []
            text = self.tokenizer.decode(answer, skip_special_tokens=True)
            choice = {"text": text, "finish_reason": reason, "logprobs": {"token_logprobs": [*before, *scores]}}
            return {"model": self.name, "choices": [choice], "usage": {"prompt_tokens": len(ids)}}
        return 404

    def _ids(self, body: dict[str, Any]) -> list[int]:
        if "messages" not in body:
            return list(self.tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])["input_ids"])
        text = self.tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.no_grad()
    def _answer(self, ids: list[int], body: dict[str, Any]) -> tuple[list[int], list[float], str]:
        bias = {int(token): value for token, value in body.get("logit_bias", {}).items()}
        answer: list[int] = []
        scores: list[float] = []
        while len(answer) < body["max_tokens"]:
            output = self.model(input_ids=torch.tensor([[*ids, *answer]]), use_cache=False, logits_to_keep=1)
            logits = output.logits[0, -1].float()
            log_probabilities = logits.log_softmax(-1)
            for token, value in bias.items():
                logits[token] += value
            token = int(logits.argmax())
            scores.append(float(log_probabilities[token]))
            if token in self.stops:
                return answer, scores, "stop"
            answer.append(token)
        return answer, scores, "length"

    @torch.no_grad()
    def _scores(self, ids: list[int], start: int) -> list[float]:
        logits = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, start:-1].float().log_softmax(-1)
        return logits[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()


@contextmanager
def running(answer: Answer) -> Iterator[str]:
    """Yield the URL of a server that answers with this function."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, body: dict[str, Any]) -> None:
            answered = answer(self.path, body)
            status = answered if isinstance(answered, int) else 200
            content = answered if isinstance(answered, bytes) else json.dumps(answered).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client did not wait
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
