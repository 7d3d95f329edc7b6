"""A GGUF file in llama.cpp, in this process, through llama-cpp-python."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.commands.verify.serving.served_model import Prompt, ServedAnswer, ServingError
from finetune.data.templates.arguments import Arguments
from finetune.runtime.optional import require

_DTYPES: Mapping[str, str] = {"0": "float16", "1": "float16", "7": "q8_0", "32": "bfloat16"}
"""The dtype in which llama.cpp computes, by the file's type; it keeps keys and values in float16."""


class LlamaCppModel:
    """The model of a GGUF file."""

    def __init__(self, path: Path) -> None:
        llama_cpp: Any = require("llama_cpp", extra="gguf", purpose="--engine llama.cpp")
        files = sorted(path.glob("*.gguf")) if path.is_dir() else [path] if path.is_file() else []
        if len(files) != 1:
            listed = ", ".join(file.name for file in files) or "none"
            raise ServingError(
                f"--engine llama.cpp: it reads one GGUF file, but {path} has {listed}. Write one with `finetune export "
                f"{path} --for llama.cpp`, or give its path: --engine llama.cpp:FILE.gguf."
            )
        self.title, self.name = "llama.cpp", files[0].name
        self.not_supported: dict[str, str] = {}
        self._library = llama_cpp
        self._path = files[0]
        self._arguments: Arguments = {}
        self._llama = self._load(n_ctx=8)
        number = self._llama.metadata.get("general.file_type", "")
        if number not in _DTYPES:
            raise ServingError(
                f"{files[0]}: weights of this type (general.file_type {number}) differ from the trained ones by "
                "design. Verify the f16 file from which they were quantized."
            )
        self.dtype: str | None = _DTYPES[number]

    def prepare(self, arguments: Arguments, *, num_tokens: int) -> None:
        """Load the weights for prompts with these template arguments, and at most this number of tokens."""
        self._arguments = arguments
        self._llama = self._load(n_ctx=num_tokens + 1, n_batch=num_tokens + 1, logits_all=True)

    def prompt_ids(self, prompt: Prompt) -> Sequence[int] | None:
        """Return the tokens of the prompt, rendered with the file's template."""
        if isinstance(prompt, str):
            return self.text_ids(prompt)
        metadata, model = self._llama.metadata, self._llama._model
        texts = {
            f"{key}_token": model.token_get_text(int(metadata[name])) if name in metadata else ""
            for key in ("bos", "eos")
            if (name := f"tokenizer.ggml.{key}_token_id")
        }
        template = metadata.get("tokenizer.chat_template", "")
        formatter = self._library.llama_chat_format.Jinja2ChatFormatter(template, **texts)
        rendered = formatter(messages=[dict(turn) for turn in prompt], **self._arguments).prompt
        return self._tokens(rendered, add_special=False)

    def text_ids(self, text: str) -> Sequence[int] | None:
        """Return the tokens of a text."""
        return self._tokens(text, add_special=True)

    def log_probabilities(self, ids: Sequence[int]) -> Sequence[float] | None:
        """Return the log-probability of each token but the first."""
        logits = self._logits(ids)[:-1].log_softmax(-1)
        chosen: list[float] = logits[torch.arange(len(ids) - 1), torch.tensor(list(ids)[1:])].tolist()
        return chosen

    def ends_answer(self, token: int, *, ids: Sequence[int]) -> bool | None:
        """Return whether it is one of the tokens at which llama.cpp ends an answer."""
        return bool(self._library.llama_vocab_is_eog(self._llama._model.vocab, token))

    def answer(self, prompt: Prompt, *, max_tokens: int) -> ServedAnswer:
        """Return the greedy answer."""
        ids = list(self.prompt_ids(prompt) or ())
        logits, answer, scores = self._logits(ids)[-1], list[int](), list[float]()
        while len(answer) < max_tokens:
            token = int(logits.argmax())
            scores.append(float(logits.log_softmax(-1)[token]))
            if self.ends_answer(token, ids=ids):
                break
            answer.append(token)
            self._llama.eval([token])
            logits = torch.from_numpy(self._llama.scores[self._llama.n_tokens - 1].copy())
        text = self._llama.detokenize(answer).decode(errors="replace") if answer else ""
        return ServedAnswer(text, len(answer) < max_tokens, len(ids), tuple(scores))

    def _load(self, **options: Any) -> Any:
        try:
            return self._library.Llama(str(self._path), verbose=False, n_threads=torch.get_num_threads(), **options)
        except (ValueError, AssertionError) as error:
            raise ServingError(f"llama.cpp cannot load {self._path}: {error}. Export it again.") from error

    def _tokens(self, text: str, *, add_special: bool) -> list[int]:
        return list(self._llama.tokenize(text.encode(), add_bos=add_special, special=True))

    def _logits(self, ids: Sequence[int]) -> Tensor:
        self._llama.reset()
        self._llama.eval(list(ids))
        return torch.from_numpy(self._llama.scores[: len(ids)].copy())  # [length, vocabulary]
