"""`finetune verify serving`: checks that an engine serves the model of an exported folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from finetune.commands.verify.comparison import EngineComparison, limits_of
from finetune.commands.verify.expected import (
    ANSWER_TOKENS,
    ExpectedResults,
    Inputs,
    Prompt,
    ServedAnswer,
    ServingError,
    compute_expected,
)
from finetune.commands.verify.openai_client import OpenAIModel
from finetune.data.templates.rendering import Arguments
from finetune.errors import UserError
from finetune.export.engines import find_engine
from finetune.model.loading.saved import SavedModel, inspect_model_folder
from finetune.report.reporter import RunLog
from finetune.runtime.files import atomic
from finetune.runtime.optional import require
from finetune.runtime.run_folder import FINAL_FOLDER
from finetune.runtime.text.terminal import quiet_libraries

REPORT_NAME = "serving.json"

ServedModel: TypeAlias = "OpenAIModel | LlamaCppModel"
"""A model in a serving engine; its methods return None for a value that the engine does not return."""


@dataclass(frozen=True)
class ServingOptions:
    """The options of the command."""

    engine: str  # NAME or NAME:URL
    base: Path | None = None
    rows: Path | None = None
    model: str | None = None
    dtype: str | None = None
    timeout_seconds: float = 120.0
    trust_remote_code: bool = False


def run_serving(folder: Path, options: ServingOptions) -> bool:
    """Compare the served model with the folder's under transformers, print and write the report; return the verdict.

    Raises ServingError if the engine cannot be reached or does not answer as its protocol says, UserError or ModelError
    for a folder that cannot be compared.
    """
    quiet_libraries(is_main=True)
    log = RunLog(is_main=True)
    saved = inspect_model_folder(folder, key="folder", trust_remote_code=options.trust_remote_code)
    served = _open(saved, options)
    expected = compute_expected(
        saved,
        base=options.base,
        rows=options.rows,
        dtype=options.dtype or served.dtype,
        trust_remote_code=options.trust_remote_code,
        check=lambda inputs: _require_log_probabilities(served, inputs),
        log=log,
    )
    log(f"comparing with {served.title}")
    comparison = compare_served(served, expected)
    report = {
        "engine": served.title,
        "model": served.name,
        "folder": str(saved.folder),
        "rows": expected.inputs.origin,
        **comparison.measurements,
        "not compared": comparison.not_compared,
        "problems": comparison.problems,
    }
    is_final = saved.folder.name == FINAL_FOLDER
    path = saved.folder.with_name(REPORT_NAME if is_final else f"{saved.folder.name}.{REPORT_NAME}")
    atomic.write_json(path, report)
    print(f"{served.title} serves `{served.name}`, compared with transformers:")
    for line in (*comparison.lines, *(f"not compared: {text}" for text in comparison.not_compared)):
        print(f"  {line}")
    if comparison.problems:
        print("It differs from the folder:\n" + "\n".join(f"  - {problem}" for problem in comparison.problems))
    print(f"{'differs' if comparison.problems else 'verified'}; details in {path}")
    return not comparison.problems


def _open(saved: SavedModel, options: ServingOptions) -> ServedModel:
    """Return the served model, before the folder's is loaded, which may take minutes."""
    name, _, address = options.engine.partition(":")
    engine = find_engine(name, option="--engine")
    if name == "llama.cpp":
        return LlamaCppModel(Path(address) if address else saved.folder)
    url = address or engine.url
    if url is None:
        raise UserError(f"--engine {name}: write the server's URL, too: --engine {name}:http://localhost:8000/v1.")
    served = OpenAIModel(engine, url, timeout_seconds=options.timeout_seconds)
    served.choose(options.model, folder=saved.folder)
    return served


def _require_log_probabilities(served: ServedModel, inputs: Inputs) -> None:
    """Raise ServingError if nothing shows which weights are served."""
    if isinstance(served, LlamaCppModel) or served.log_probabilities(inputs.rows[0]) is not None:
        return
    if not any(served.answer(prompt, max_tokens=2).log_probabilities for prompt in inputs.prompts):
        raise ServingError(
            f"{served.title} reports no log-probabilities, neither of rows nor of answers, so its weights cannot be "
            "compared. Use a version that does, or verify the same files with another engine."
        )


def compare_served(served: ServedModel, expected: ExpectedResults) -> EngineComparison:
    """Return the equal and the differing results."""
    comparison, inputs = EngineComparison(), expected.inputs
    longest = max(map(len, (*inputs.rows, *inputs.prompt_ids)))
    served.prepare(expected.template_arguments, num_tokens=longest + ANSWER_TOKENS)
    titles = [prompt if isinstance(prompt, str) else str(prompt[-1]["content"]) for prompt in inputs.prompts]
    prompt_ids = _until_none(served.prompt_ids(prompt) for prompt in inputs.prompts)
    comparison.compare_ids("prompts", titles, inputs.prompt_ids, prompt_ids)
    text_ids = _until_none(served.text_ids(text) for text in inputs.texts)
    comparison.compare_ids("texts", inputs.texts, inputs.text_ids, text_ids)
    row = inputs.rows[0]
    ordinary = next(token for token in reversed(row) if token not in expected.stops)
    tokens = (*expected.stops, ordinary)
    comparison.compare_stops(expected.stops, {token: served.ends_answer(token, ids=row) for token in tokens})
    limits = limits_of(expected.scores, expected.rounded, dtype=expected.dtype, depth=expected.num_layers)
    scores = _until_none(served.log_probabilities(row) for row in inputs.rows)
    if scores[0] is not None:
        differences = comparison.compare_scores(expected.scores, scores, limits=limits)
        if expected.base is None:
            comparison.not_compared.append("the effect of training (give the base model's folder with --base)")
        else:
            comparison.compare_effect(expected.scores, expected.base, differences, limits=limits)
    answers = [served.answer(prompt, max_tokens=ANSWER_TOKENS) for prompt in inputs.prompts]
    lengths = [len(ids) for ids in inputs.prompt_ids]
    comparison.compare_answers(expected.answers, answers, num_tokens=lengths, limits=limits)
    comparison.not_compared += [f"{title} ({reason})" for title, reason in served.not_supported.items()]
    return comparison


def _until_none(values: Any) -> list[Any]:
    """Return all values, or only None if the first one is: the engine is then not asked again."""
    listed = []
    for value in values:
        listed.append(value)
        if value is None:
            return [None]
    return listed


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
        threads = dict.fromkeys(("n_threads", "n_threads_batch"), torch.get_num_threads())
        try:
            return self._library.Llama(str(self._path), verbose=False, **threads, **options)
        except (ValueError, AssertionError) as error:
            raise ServingError(f"llama.cpp cannot load {self._path}: {error}. Export it again.") from error

    def _tokens(self, text: str, *, add_special: bool) -> list[int]:
        return list(self._llama.tokenize(text.encode(), add_bos=add_special, special=True))

    def _logits(self, ids: Sequence[int]) -> Tensor:
        self._llama.reset()
        self._llama.eval(list(ids))
        return torch.from_numpy(self._llama.scores[: len(ids)].copy())  # [length, vocabulary]
