"""A model measured row by row: the loss of each row, whether it is right, and greedy answers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from finetune.config.sections.data import NO_LIMIT
from finetune.data.features import Features
from finetune.data.templates.chat_template import stop_ids
from finetune.errors import UserError
from finetune.task.causal_lm import pad_id
from finetune.task.generation import generate
from finetune.task.model_inputs import unwrap_model
from finetune.task.protocol import EvaluationOutput, GenerationPrompt, Task

_BATCH_SIZE = 8


@dataclass(frozen=True)
class RowResults:
    """What a model reaches on each row; all arrays are [rows]."""

    losses: np.ndarray  # float64, summed over the row's targets
    num_targets: np.ndarray  # float64
    num_correct: np.ndarray  # float64: targets with the highest logit; 0 if the task is not a language model
    is_right: np.ndarray  # bool: all targets, the class or classes, or the preference


@torch.no_grad()
def measure_rows(model: Any, task: Task, rows: Iterable[Features], *, device: torch.device) -> RowResults:
    """Return the results of each row, which is a batch by itself: they do not depend on its neighbors.

    Raises UserError if the loss is not a sum over rows.
    """
    columns: list[tuple[float, float, float, bool]] = []
    model.eval()
    for features in rows:
        output = task.evaluate_batch(model, task.collate([features]).to(device))
        sums = {name: float(value) for name, value in output.sums.items()}
        if "loss_sum" not in sums:
            raise UserError("--against: task.preference.loss: `kto` is not a sum over rows, so rows have no losses.")
        num_targets = sums.get("num_targets", sums.get("num_pairs", 1.0))
        columns.append((sums["loss_sum"], num_targets, sums.get("num_correct", 0.0), _is_right(output, sums)))
    return RowResults(*(np.array(column) for column in zip(*columns, strict=True)))


def _is_right(output: EvaluationOutput, sums: Mapping[str, float]) -> bool:
    if "num_correct" in sums:  # with the answer so far given: the greedy answer is then the reference
        return sums["num_correct"] == sums["num_targets"]
    if "log_probability_chosen" in sums:
        return sums["log_probability_chosen"] > sums["log_probability_rejected"]
    if output.records is None:
        return False
    labels, predicted = output.records[:, 1:].chunk(2, dim=1)
    return bool((labels == predicted).all())


@dataclass(frozen=True)
class GreedyDecoder:
    """Answers prompts with the most likely tokens."""

    tokenizer: Any
    device: torch.device
    max_new_tokens: int

    def answers(self, model: Any, prompts: Sequence[GenerationPrompt]) -> list[list[int]]:
        """Return the tokens of each answer, with the stop token, as far as the model has positions. Collective."""
        model.eval()
        limit, answers = max_positions(model), list[list[int]]()
        for start in range(0, len(prompts), _BATCH_SIZE):
            batch = prompts[start : start + _BATCH_SIZE]
            room = limit - max(len(prompt.input_ids) for prompt in batch)
            answers += generate(
                model,
                batch,
                pad_id=pad_id(self.tokenizer),
                stop_ids=stop_ids(self.tokenizer),
                max_new_tokens=max(1, min(self.max_new_tokens, room)),
                device=self.device,
            )
        return answers

    def text(self, ids: Sequence[int]) -> str:
        """Return the tokens as text, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()


def max_positions(model: Any) -> int:
    """Return the longest row that the model reads; NO_LIMIT if its config names none, or its answers have their own."""
    config = unwrap_model(model).config
    if getattr(config, "is_encoder_decoder", False):
        return NO_LIMIT
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or NO_LIMIT)


@dataclass(frozen=True)
class ShownRow:
    """A row with the losses per target and, if the task has any, the greedy answers of both models."""

    location: str
    prompt: str
    reference: str
    baseline_loss: float
    tuned_loss: float
    baseline_answer: str | None = None
    tuned_answer: str | None = None
