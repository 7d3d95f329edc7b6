"""The served model and its expected results: tokens, log-probabilities and greedy answers under transformers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from unicodedata import is_normalized

import torch
from torch import Tensor

from finetune.commands.export import processing_in
from finetune.config.load import RESOLVED_NAME, load_resolved
from finetune.config.sections.data import SourceSection
from finetune.data.rows import Row, Turn
from finetune.data.sources.source import open_source, open_sources, rows_read
from finetune.data.templates.chat_template import stop_ids, tokenize
from finetune.data.templates.rendering import Arguments, arguments_of, render_chat
from finetune.errors import DataError, FinetuneError, UserError
from finetune.export.verify.rows import CONVERSATIONS
from finetune.model.generation import SamplingParams, generate_batch
from finetune.model.loading.saved import SavedModel, inspect_model_folder, load_saved_model
from finetune.model.processing import HOSTILE_TEXTS
from finetune.runtime.optional import no_op
from finetune.task.causal_lm import pad_id

Prompt = str | Sequence[Turn]
"""The turns of a conversation, or the text that a model without a chat template continues."""


class ServingError(UserError):
    """The engine cannot be reached, or does not answer as its protocol says."""


@dataclass(frozen=True)
class ServedAnswer:
    """The greedy answer to a prompt."""

    text: str
    is_complete: bool  # it ended by itself, not at the limit of tokens
    num_prompt_tokens: int | None  # as the engine counts them
    log_probabilities: tuple[float, ...] = ()  # of its tokens, as far as the engine reports them


NUM_ROWS = 64
MAX_ROW_TOKENS = 256
NUM_PROMPTS = 8
ANSWER_TOKENS = 48
NUM_TEXTS = 32
_BLOCK = 32
"""The weights with a common scale in llama.cpp's q8_0."""


@dataclass(frozen=True)
class Inputs:
    """The rows, prompts and texts that both sides are given."""

    rows: tuple[tuple[int, ...], ...]  # of token ids
    prompts: tuple[Prompt, ...]
    prompt_ids: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    text_ids: tuple[tuple[int, ...], ...]
    origin: str  # of the rows, for the report


@dataclass(frozen=True)
class RowScores:
    """The model's scores of one row: a value for each token but the first."""

    log_probabilities: Tensor
    deviations: Tensor  # standard deviations of the logits, with which rounding errors grow


@dataclass(frozen=True)
class ExpectedAnswer:
    """A greedy answer, and how clearly each of its tokens was chosen."""

    tokens: tuple[int, ...]
    is_complete: bool
    log_probabilities: tuple[float, ...]
    margins: tuple[float, ...]  # between the likeliest token and the next one
    prefixes: tuple[str, ...]  # the text of the first tokens: of none, of one, ...


@dataclass(frozen=True)
class ExpectedResults:
    """Results of transformers on the folder, in float32, to be compared with any engine's results."""

    inputs: Inputs
    stops: Mapping[int, str]  # names of the tokens that end an answer
    answers: tuple[ExpectedAnswer, ...]
    scores: tuple[RowScores, ...]
    rounded: tuple[RowScores, ...] | None  # in a lower dtype, if the engine computes in it
    base: tuple[RowScores, ...] | None  # before training
    dtype: str
    num_layers: int
    template_arguments: Arguments


def compute_expected(
    saved: SavedModel,
    *,
    base: Path | None,
    rows: Path | None,
    dtype: str | None,
    trust_remote_code: bool,
    check: Callable[[Inputs], None] = no_op,
    log: Callable[[str], None] = no_op,
) -> ExpectedResults:
    """Return the results; raises UserError for a folder without a tokenizer or a model that does not continue text.

    `check` may refuse the inputs before anything is computed, which can take minutes.
    """
    model = ExpectedModel(saved, base=base, trust_remote_code=trust_remote_code)
    inputs = model.inputs(rows)
    check(inputs)
    dtype = dtype or model.dtype
    num_tokens = sum(map(len, inputs.rows))
    log(f"computing {num_tokens:,} tokens in {len(inputs.rows)} rows with transformers ({inputs.origin})")
    answers, scores = model.answers(inputs.prompt_ids), model.scores(inputs.rows)
    if base is not None or saved.adapter is not None:
        log("computing them with the base model")
    base_scores = model.base_scores(inputs.rows)
    if dtype != "float32":
        log(f"computing them in {dtype}")
    return ExpectedResults(
        inputs=inputs,
        stops={token: str(model.tokenizer.convert_ids_to_tokens(token)) for token in sorted(model.stop_ids)},
        answers=tuple(answers),
        scores=scores,
        rounded=None if dtype == "float32" else model.rounded_scores(inputs.rows, dtype=dtype),
        base=base_scores,
        dtype=dtype,
        num_layers=int(saved.config.get_text_config().num_hidden_layers),
        template_arguments=arguments_of(model.tokenizer),
    )


class ExpectedModel:
    """The folder's model under transformers, in float32."""

    def __init__(self, saved: SavedModel, *, base: Path | None, trust_remote_code: bool) -> None:
        if saved.head != "causal_lm":
            raise UserError(f"{saved.folder}: a `{saved.head}` model does not continue text, so it cannot be compared.")
        self.saved = saved
        tokenizer = processing_in(saved, trust_remote_code=trust_remote_code).tokenizer
        if tokenizer is None:
            raise UserError(f"{saved.folder} has no tokenizer. Copy tokenizer files into it.")
        self.tokenizer: Any = tokenizer
        self._base = base
        self._trust = trust_remote_code
        self._model = load_saved_model(saved, key="folder", dtype="float32", trust_remote_code=trust_remote_code)
        ids = self._model.generation_config.eos_token_id
        own = () if ids is None else (ids,) if isinstance(ids, int) else ids
        self.stop_ids = stop_ids(tokenizer) | frozenset(map(int, own))

    @property
    def dtype(self) -> str:
        """Return the dtype of the folder's weights, in which an engine computes by default."""
        name = str(self.saved.config.dtype or "float32").removeprefix("torch.")
        return name if name in ("float16", "bfloat16") else "float32"

    def scores(self, rows: Sequence[Sequence[int]]) -> tuple[RowScores, ...]:
        """Return the scores of the folder's model."""
        return tuple(_scores(self._model, row) for row in rows)

    def base_scores(self, rows: Sequence[Sequence[int]]) -> tuple[RowScores, ...] | None:
        """Return the scores of the base: that of `--base`, or of the adapter; None for a full model without one."""
        if self._base is not None:
            base = inspect_model_folder(self._base, key="--base", trust_remote_code=self._trust)
            model = load_saved_model(base, key="--base", dtype="float32", trust_remote_code=self._trust)
            return tuple(_scores(model, row) for row in rows)
        if self.saved.adapter is None:
            return None
        with self._model.disable_adapter():
            return self.scores(rows)

    def rounded_scores(self, rows: Sequence[Sequence[int]], *, dtype: str) -> tuple[RowScores, ...]:
        """Round the model and return its scores, computed in this dtype; with q8_0, in float32."""
        if dtype != "q8_0":
            self._model.to(getattr(torch, dtype))
            return self.scores(rows)
        for parameter in self._model.parameters():
            if parameter.dim() > 1 and parameter.shape[-1] % _BLOCK == 0:
                blocks = parameter.data.view(-1, _BLOCK)
                scale = (blocks.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
                blocks.copy_((blocks / scale).round() * scale)
        return self.scores(rows)

    def answers(self, prompts: Sequence[Sequence[int]]) -> list[ExpectedAnswer]:
        """Return the greedy answers to the prompts."""
        if not prompts:
            return []
        generated = generate_batch(
            self._model,
            prompts,
            [0] * len(prompts),
            sampling=SamplingParams(ANSWER_TOKENS),
            pad_id=pad_id(self.tokenizer),
            stop_ids=self.stop_ids,
        )
        return [self._answer(prompt, tokens) for prompt, tokens in zip(prompts, generated, strict=True)]

    def _answer(self, prompt: Sequence[int], tokens: Sequence[int]) -> ExpectedAnswer:
        logits = _logits(self._model, [*prompt, *tokens])[len(prompt) - 1 : -1].log_softmax(-1)
        best = logits.topk(2).values
        texts = [str(self.tokenizer.decode(tokens[:n], skip_special_tokens=True)) for n in range(len(tokens) + 1)]
        return ExpectedAnswer(
            tokens=tuple(tokens),
            is_complete=bool(tokens) and tokens[-1] in self.stop_ids,
            log_probabilities=tuple(logits[torch.arange(len(tokens)), torch.tensor(tokens)].tolist()),
            margins=tuple((best[:, 0] - best[:, 1]).tolist()),
            prefixes=tuple(texts),
        )

    def inputs(self, rows: Path | None) -> Inputs:
        """Return rows of this file, else of the run that the folder is from, completed by synthetic ones."""
        read, origin = self._read_rows(rows)
        limit = int(getattr(self.saved.config.get_text_config(), "max_position_embeddings", 0) or 1 << 30)
        encoded = [self._row_ids(row) for row in read]
        synthetic = ("\n".join((*HOSTILE_TEXTS[1 + n :], *HOSTILE_TEXTS[1:n])) for n in range(NUM_ROWS))
        encoded += [self._ids(text) for text in islice(synthetic, NUM_ROWS - len(encoded))]
        cut = (tuple(ids[: min(MAX_ROW_TOKENS, limit - 1)]) for ids in encoded)
        prompts, prompt_ids = [], []
        for prompt in self._prompts(read):
            try:
                ids = self.render(prompt)
            except DataError:  # the template refuses it
                continue
            if len(ids) + ANSWER_TOKENS <= limit:
                prompts.append(prompt)
                prompt_ids.append(tuple(ids))
        texts = tuple(
            text for text in HOSTILE_TEXTS if text.strip() and is_normalized("NFC", text) and "\0" not in text
        )
        return Inputs(
            rows=tuple(row for row in cut if len(row) > 1),
            prompts=tuple(prompts[:NUM_PROMPTS]),
            prompt_ids=tuple(prompt_ids[:NUM_PROMPTS]),
            texts=texts[:NUM_TEXTS],
            text_ids=tuple(tuple(self._ids(text)) for text in texts[:NUM_TEXTS]),
            origin=origin,
        )

    def render(self, prompt: Prompt) -> list[int]:
        """Return the tokens of the prompt as training rendered them."""
        if isinstance(prompt, str):
            return self._ids(prompt)
        return tokenize(self.tokenizer, render_chat(self.tokenizer, prompt, add_generation_prompt=True).text)

    def _read_rows(self, rows: Path | None) -> tuple[list[Row], str]:
        if rows is not None:
            source = open_source(SourceSection(path=str(rows)), key="--rows", log=no_op)
            return list(islice(rows_read([source]), NUM_ROWS)), str(rows)
        folders = (self.saved.folder.parent, self.saved.folder.parent.parent)
        run = next((folder for folder in folders if (folder / RESOLVED_NAME).is_file()), None)
        if run is None:
            return [], "synthetic rows"
        try:
            config = load_resolved(run).config
            sources = open_sources(config.data, seed=config.run.seed, log=no_op)
            chosen = sources.train if sources.validation is None else (sources.validation,)
            return list(islice(rows_read(chosen), NUM_ROWS)), f"rows of {run.name}"
        except (FinetuneError, OSError) as error:
            return [], f"synthetic rows, because the data of {run.name} cannot be read ({error})"

    def _row_ids(self, row: Row) -> list[int]:
        turns = _turns(row, is_whole=True)
        if turns and self.tokenizer.chat_template:
            return tokenize(self.tokenizer, render_chat(self.tokenizer, turns).text)
        return self._ids(str(row.get("text") or "\n".join(str(turn["content"]) for turn in turns)))

    def _prompts(self, rows: Sequence[Row]) -> Iterator[Prompt]:
        if not self.tokenizer.chat_template:
            texts = [str(row["text"]) for row in rows if row.get("text")]
            yield from (text[: max(8, len(text) // 2)][:400] for text in (*texts, *HOSTILE_TEXTS[-6:]))
            return
        conversations = [_turns(row, is_whole=False) for row in rows]
        yield from (turns for turns in conversations if turns)
        yield from ([dict(turn) for turn in turns[:-1]] for turns in CONVERSATIONS)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, verbose=False)["input_ids"])


def _turns(row: Row, *, is_whole: bool) -> list[Any]:
    """Return the row's turns of text, without a last answer unless the whole conversation is requested."""
    turns = list(row.get("messages") or (*row.get("prompt", ()), *row.get("chosen", ())))
    if not all(isinstance(turn.get("content"), str) for turn in turns) or row.get("tools"):
        return []
    while turns and not is_whole and turns[-1]["role"] == "assistant":
        turns.pop()
    return turns


@torch.no_grad()
def _logits(model: Any, ids: Sequence[int]) -> Tensor:
    with torch.compiler.set_stance("force_eager") if torch.cuda.is_available() else nullcontext():
        logits: Tensor = model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False).logits[0]
    return logits.float().cpu()  # [length, vocabulary]


def _scores(model: Any, ids: Sequence[int]) -> RowScores:
    logits = _logits(model, ids)[:-1]
    chosen = logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(list(ids)[1:])]
    return RowScores(chosen, logits.std(-1))
