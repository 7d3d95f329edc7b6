"""General texts and chats: what a tuned model has forgotten of its baseline.

The baseline answers each row greedily. The tuned model reads these answers, and each token of which it would have
chosen another one has changed; an answer without a changed token is its own greedy answer, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finetune.commands.gate.differences import PairedDifference, loss_difference
from finetune.commands.gate.rows import GreedyDecoder, RowResults, ShownRow, measure_rows
from finetune.config.sections.data import DataSection, SourceSection
from finetune.config.sections.task import TaskSection
from finetune.data.features import Features
from finetune.data.formats.columns import ColumnNames
from finetune.data.formats.row_format import ColumnFormat
from finetune.data.rows import RawRow
from finetune.data.sources.local import find_local
from finetune.errors import DataError
from finetune.runtime.optional import no_op
from finetune.task.protocol import GenerationPrompt, Task, TaskContext, build_task

GENERAL_ROWS = Path(__file__).parent / "general.jsonl"
"""Short texts and chats, written for this package."""

MAX_ANSWER_TOKENS = 32
_COLUMNS = {"messages": "sft", "text": "pretrain"}
"""The columns of a row, which are also the names of their formats, and the tasks that encode them."""


@dataclass(frozen=True)
class BaselineAnswers:
    """The baseline's results on general rows, its greedy answers, and its results on these."""

    results: RowResults
    answers: Sequence[Features]  # the prompts with the answers, whose tokens are the targets
    answer_results: RowResults


@dataclass(frozen=True)
class Forgetting:
    """How a tuned model differs from the baseline on general rows."""

    loss: PairedDifference
    num_rows: int
    num_left_out: int
    answers_changed: float  # share of the greedy answers with a changed token
    tokens_changed: float  # share of all tokens of the answers
    shown: Sequence[ShownRow]  # the answers that changed most


@dataclass(frozen=True)
class GeneralRows:
    """General rows as samples, each with the prompt that is answered."""

    task: Task
    decoder: GreedyDecoder
    locations: Sequence[str]
    samples: Sequence[Features]
    prompts: Sequence[GenerationPrompt]
    num_left_out: int

    def measure_baseline(self, model: Any) -> BaselineAnswers:
        """Return what the baseline reaches and answers. Collective."""
        answers = []
        for prompt, ids in zip(self.prompts, self.decoder.answers(model, self.prompts), strict=True):
            tokens = np.array([*prompt.input_ids, *ids], np.uint32)
            answers.append(
                Features({"input_ids": tokens, "is_target": np.arange(len(tokens)) >= len(prompt.input_ids)})
            )
        results, answer_results = self._measure(model, self.samples), self._measure(model, answers)
        return BaselineAnswers(results, answers, answer_results)

    def measure_forgetting(self, model: Any, baseline: BaselineAnswers, *, num_shown: int) -> Forgetting:
        """Return how the tuned model differs from the baseline. Collective."""
        results, answer_results = self._measure(model, self.samples), self._measure(model, baseline.answers)
        # compared with the baseline's own pass, which rounds as this one does
        changed = np.maximum(baseline.answer_results.num_correct - answer_results.num_correct, 0)
        shares = changed / answer_results.num_targets
        most = [int(index) for index in np.argsort(-shares, kind="stable")[:num_shown] if changed[index]]
        tuned_answers = self.decoder.answers(model, [self.prompts[index] for index in most])
        text, before = self.decoder.text, baseline.results
        shown = [
            ShownRow(
                self.locations[index],
                text(self.prompts[index].input_ids),
                text(self.prompts[index].reference_ids),
                float(before.losses[index] / before.num_targets[index]),
                float(results.losses[index] / results.num_targets[index]),
                text(baseline.answers[index].arrays["input_ids"][len(self.prompts[index].input_ids) :].tolist()),
                text(answer),
            )
            for index, answer in zip(most, tuned_answers, strict=True)
        ]
        return Forgetting(
            loss_difference(before.losses, results.losses, before.num_targets),
            len(self.samples),
            self.num_left_out,
            float((changed > 0).mean()),
            float(changed.sum() / answer_results.num_targets.sum()),
            shown,
        )

    def _measure(self, model: Any, samples: Sequence[Features]) -> RowResults:
        return measure_rows(model, self.task, samples, device=self.decoder.device)


def read_general(path: Path, data: DataSection, decoder: GreedyDecoder, *, longest: int) -> GeneralRows:
    """Return the rows with `messages` or `text` in the file; chats are rendered as those of the job.

    A chat is answered after its last question, a text is continued from its half. Left out are chats if the tokenizer
    has no chat template, and rows with more tokens than `longest`. Raises DataError for rows of another kind, and if
    none is left.
    """
    batching = data.batching.model_copy(update={"by": "samples", "padding_free": False})
    section = data.model_copy(update={"batching": batching, "train_on": "assistant"})
    can_chat = decoder.tokenizer.chat_template is not None
    tasks = {
        column: build_task(TaskContext(TaskSection.model_validate({"name": name}), section, decoder.tokenizer, None))
        for column, name in _COLUMNS.items()
        if can_chat or column == "text"
    }
    locations: list[str] = []
    samples: list[Features] = []
    prompts: list[GenerationPrompt] = []
    num_rows = 0
    for shard in find_local(SourceSection(path=str(path)), key="--general", log=no_op).shards():
        for raw in shard.rows():
            num_rows += 1
            column = next((name for name in _COLUMNS if name in raw.parse()), None)
            if column is None:
                raise DataError(f"{raw.location}: a general row has the column `text` or `messages`.")
            sample = _encode(tasks[column], raw, column) if column in tasks else None
            if sample is not None and 1 < sample.length <= longest:
                locations.append(raw.location)
                samples.append(sample)
                prompts.append(tasks[column].prompt(sample) or _first_half(sample))
    if not samples:
        raise DataError(f"--general: {path} has no row of at most {longest:,} tokens.")
    return GeneralRows(tasks["text"], decoder, locations, samples, prompts, num_rows - len(samples))


def _encode(task: Task, raw: RawRow, column: str) -> Features | None:
    row = ColumnFormat(ColumnNames(format=column, columns={}, template={}, key="--general")).read(raw)
    try:
        return task.encode_row(row)
    except DataError as error:
        raise DataError(f"{raw.location}: {error}") from error


def _first_half(sample: Features) -> GenerationPrompt:
    ids = sample.arrays["input_ids"].tolist()
    return GenerationPrompt(tuple(ids[: len(ids) // 2]), tuple(ids[len(ids) // 2 :]))
