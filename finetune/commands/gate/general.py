"""General texts and chats: what a tuned model has forgotten of its baseline.

The baseline answers each row greedily. The tuned model reads these answers: a token has changed if the tuned model
would have chosen another one. It would have given an answer without a changed token, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from finetune.commands.gate.differences import PairedDifference, loss_difference
from finetune.commands.gate.rows import RowResults, map_over_ranks, measure_rows
from finetune.config.sections.data import NO_LIMIT, DataSection, SourceSection
from finetune.config.sections.task import TaskSection
from finetune.data.features import Features
from finetune.data.formats.columns import ColumnNames
from finetune.data.formats.row_format import ColumnFormat
from finetune.data.rows import RawRow
from finetune.data.sources.local import find_local
from finetune.data.templates.chat_template import stop_ids
from finetune.errors import DataError
from finetune.runtime.optional import no_op
from finetune.task.causal_lm import pad_id
from finetune.task.generation import generate_tokens
from finetune.task.model_inputs import unwrap_model
from finetune.task.protocol import GenerationPrompt, Task, TaskContext, build_task

GENERAL_ROWS = Path(__file__).parent / "general.jsonl"
"""Short texts and chats, written for this package."""

_ANSWER_TOKENS = 32
_BATCH_SIZE = 8
_TASKS = {"messages": "sft", "text": "pretrain"}
"""The task that encodes a row, by its column, which is also the name of its format."""


@dataclass(frozen=True)
class GeneralResults:
    """What a model reaches on general rows, and on the baseline's greedy answers to them."""

    of_rows: RowResults
    answers: Sequence[Features]  # the prompts with the answers, whose tokens are the targets
    of_answers: RowResults


@dataclass(frozen=True)
class Forgetting:
    """How a tuned model differs from the baseline on general rows."""

    loss: PairedDifference
    num_rows: int
    num_left_out: int  # too long, or chats without a chat template
    answers_changed: float  # share of the baseline's greedy answers with a changed token
    tokens_changed: float  # share of all tokens of the answers


@dataclass(frozen=True)
class GeneralRows:
    """General rows as samples, each with the prompt that is answered."""

    task: Task
    tokenizer: Any
    samples: Sequence[Features]
    prompts: Sequence[GenerationPrompt]
    num_left_out: int

    def measure(self, model: Any, *, answers: Sequence[Features] | None = None) -> GeneralResults:
        """Return the results of the model; without answers, it is the baseline, which gives them. Collective."""
        if answers is None:
            answers = self._answers(model)
        of_rows, of_answers = (measure_rows(model, self.task, rows) for rows in (self.samples, answers))
        return GeneralResults(of_rows, answers, of_answers)

    def _answers(self, model: Any) -> list[Features]:
        def answer(batch: Sequence[GenerationPrompt]) -> list[Features]:
            generated = generate_tokens(
                model.eval(),
                batch,
                pad_id=pad_id(self.tokenizer),
                stop_ids=stop_ids(self.tokenizer),
                max_new_tokens=_ANSWER_TOKENS,
                device=model.device,
            )
            tokens = [
                np.array([*prompt.input_ids, *ids], np.uint32) for prompt, ids in zip(batch, generated, strict=True)
            ]
            return [
                Features({"input_ids": ids, "is_target": np.arange(len(ids)) >= len(prompt.input_ids)})
                for prompt, ids in zip(batch, tokens, strict=True)
            ]

        batches = [self.prompts[start : start + _BATCH_SIZE] for start in range(0, len(self.prompts), _BATCH_SIZE)]
        return list(chain.from_iterable(map_over_ranks(answer, batches)))

    def forgetting(self, baseline: GeneralResults, tuned: GeneralResults) -> Forgetting:
        """Return how the tuned model differs from the baseline."""
        # compared with the baseline's own pass, which rounds as this one does
        changed = np.maximum(baseline.of_answers.num_correct - tuned.of_answers.num_correct, 0)
        return Forgetting(
            loss_difference(baseline.of_rows.losses, tuned.of_rows.losses, tuned.of_rows.num_targets),
            len(self.samples),
            self.num_left_out,
            answers_changed=float((changed > 0).mean()),
            tokens_changed=float(changed.sum() / tuned.of_answers.num_targets.sum()),
        )


def read_general(path: Path, data: DataSection, tokenizer: Any, model: Any) -> GeneralRows:
    """Return the rows with `messages` or `text` in the file; chats are rendered with the job's template.

    A chat is answered after its last question, a text is continued from its half. Left out are chats if the tokenizer
    has no chat template, and rows that are too long for `data.max_length` or for the model with an answer. Raises
    DataError for rows of another kind, and if none is left.
    """
    batching = data.batching.model_copy(update={"by": "samples", "padding_free": False})
    section = data.model_copy(update={"batching": batching, "train_on": "assistant"})
    tasks = {
        column: build_task(TaskContext(TaskSection.model_validate({"name": name}), section, tokenizer, None))
        for column, name in _TASKS.items()
        if column == "text" or tokenizer.chat_template is not None
    }
    inner: Any = unwrap_model(model)
    positions = getattr(inner.config.get_text_config(), "max_position_embeddings", None) or NO_LIMIT
    longest = min(data.longest, positions - _ANSWER_TOKENS)
    samples: list[Features] = []
    prompts: list[GenerationPrompt] = []
    shards = find_local(SourceSection(path=str(path)), key="--general", log=no_op).shards()
    rows = list(chain.from_iterable(shard.rows() for shard in shards))
    for raw in rows:
        column = next((name for name in _TASKS if name in raw.parse()), None)
        if column is None:
            raise DataError(f"{raw.location}: a general row has the column `text` or `messages`.")
        sample = _encode(tasks[column], raw, column) if column in tasks else None
        if sample is not None and 1 < sample.length <= longest:
            samples.append(sample)
            prompts.append(tasks[column].prompt(sample) or _first_half(sample))
    if not samples:
        raise DataError(f"--general: {path} has no row of at most {longest:,} tokens.")
    return GeneralRows(tasks["text"], tokenizer, samples, prompts, num_left_out=len(rows) - len(samples))


def _encode(task: Task, raw: RawRow, column: str) -> Features | None:
    row = ColumnFormat(ColumnNames(format=column, columns={}, template={}, key="--general")).read(raw)
    try:
        return task.encode_row(row)
    except DataError as error:
        raise DataError(f"{raw.location}: {error}") from error


def _first_half(sample: Features) -> GenerationPrompt:
    ids = sample.arrays["input_ids"].tolist()
    return GenerationPrompt(tuple(ids[: len(ids) // 2]), tuple(ids[len(ids) // 2 :]))
