"""Evaluation by generation: the model answers validation prompts on all ranks, and the answers are scored."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from finetune.config.sections.evaluate import GenerateSection
from finetune.errors import UserError
from finetune.runtime import distributed
from finetune.runtime.supervision.heartbeat import fault_point
from finetune.task.causal_lm import pad_id
from finetune.task.generation.decoding import generate, image_decode_state
from finetune.task.protocol import GenerationPrompt

Metric = Callable[[Sequence[str], Sequence[str]], float]


@dataclass(frozen=True)
class Answer:
    """A prompt, what the model said and what it should have said, as text."""

    prompt: str
    answer: str
    reference: str


@dataclass(frozen=True)
class GenerationEvaluator:
    """The prompts and how they are answered: greedily, in batches, the same number of batches on every rank."""

    section: GenerateSection
    prompts: Sequence[GenerationPrompt]
    tokenizer: Any
    stop_ids: frozenset[int]
    device: torch.device
    metrics: dict[str, Metric]

    def generate_all(self, model: nn.Module, *, step: int) -> list[Answer]:
        """Return the answers in the order of the prompts, on every rank. Collective."""
        own = list(self.prompts[distributed.rank() :: distributed.world()])
        most = -(-len(self.prompts) // distributed.world())
        answered: list[tuple[int, ...]] = []
        batch_size = 1 if self._has_images else self.section.batch_size
        for start in range(0, most, batch_size):
            fault_point("evaluate", step=step)
            batch = own[start : start + batch_size]
            answered += map(tuple, self._generate(model, batch))
        gathered = distributed.gather_objects(answered)
        world = distributed.world()
        return [self._as_text(prompt, gathered[i % world][i // world]) for i, prompt in enumerate(self.prompts)]

    def score(self, answers: Sequence[Answer]) -> dict[str, float]:
        """Return each metric over (answers, references)."""
        said = [answer.answer for answer in answers]
        wanted = [answer.reference for answer in answers]
        return {name: float(metric(said, wanted)) for name, metric in self.metrics.items()}

    @property
    def _has_images(self) -> bool:
        """Tell whether prompts show images: then each is answered alone, and a rank without one reads the first."""
        return any(prompt.inputs for prompt in self.prompts)

    def _generate(self, model: nn.Module, batch: Sequence[GenerationPrompt]) -> list[list[int]]:
        first, pads = (batch or self.prompts)[0], pad_id(self.tokenizer)
        return generate(
            model,
            [prompt.input_ids for prompt in batch],
            pad_id=pads,
            stop_ids=self.stop_ids,
            max_new_tokens=self.section.max_new_tokens,
            device=self.device,
            all_finished=_all_ranks_finished,
            state=image_decode_state(model, first, pad_id=pads, device=self.device) if self._has_images else None,
        )

    def _as_text(self, prompt: GenerationPrompt, answer: Sequence[int]) -> Answer:
        def decode(ids: Sequence[int]) -> str:
            return str(self.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()

        asked = str(self.tokenizer.decode(list(prompt.input_ids), skip_special_tokens=False))
        return Answer(asked, decode(answer), decode(prompt.reference_ids))


def load_metrics(names: Sequence[str]) -> dict[str, Metric]:
    """Return the metrics by their short names; raises UserError for one that cannot be imported."""
    return {name.rpartition(":")[2]: _load_metric(name) for name in names}


def exact_match(answers: Sequence[str], references: Sequence[str]) -> float:
    """Return the share of answers equal to their reference, surrounding blanks aside."""
    pairs = list(zip(answers, references, strict=True))
    return sum(said.strip() == wanted.strip() for said, wanted in pairs) / max(1, len(pairs))


def _load_metric(name: str) -> Metric:
    if name == "exact_match":
        return exact_match
    module, _, function = name.partition(":")
    try:
        metric: Metric = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"evaluate.generate.metrics: `{name}` cannot be had ({error}). Write `exact_match` or "
            "`package.module:function`, importable from the folder in which you launch."
        ) from error
    return metric


def _all_ranks_finished(is_finished: bool) -> bool:
    return distributed.sum_counts([int(not is_finished)]) == [0]
