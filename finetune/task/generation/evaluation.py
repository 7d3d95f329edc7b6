"""Evaluation by generation: the model answers validation prompts on all ranks, and the answers are scored."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from finetune.config.sections.evaluate import GenerateSection
from finetune.errors import RegistryError, UserError
from finetune.registry.metrics import METRICS
from finetune.registry.table import import_attribute
from finetune.runtime import distributed
from finetune.runtime.supervision.heartbeat import fault_point
from finetune.task.causal_lm import pad_id
from finetune.task.generation.decoding import generate, has_prompt_learning
from finetune.task.protocol import GenerationPrompt

Metric = Callable[[Sequence[str], Sequence[str]], float]


@dataclass(frozen=True)
class Answer:
    """A prompt, the answer of the model and the reference answer, as text."""

    prompt: str
    answer: str
    reference: str


@dataclass(frozen=True)
class GenerationEvaluator:
    """Generates answers to prompts: greedily, in batches, the same number of batches on every rank."""

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
        batch_size = self._batch_size(model)
        for start in range(0, most, batch_size):
            fault_point("evaluate", step=step)
            batch = own[start : start + batch_size]
            answers = generate(
                model,
                batch or self.prompts[:1],  # a rank without a prompt takes part all the same
                pad_id=pad_id(self.tokenizer),
                stop_ids=self.stop_ids,
                max_new_tokens=self.section.max_new_tokens,
                device=self.device,
            )
            answered += map(tuple, answers[: len(batch)])
        gathered = distributed.gather_objects(answered)
        world = distributed.world()
        return [self._as_text(prompt, gathered[i % world][i // world]) for i, prompt in enumerate(self.prompts)]

    def score(self, answers: Sequence[Answer]) -> dict[str, float]:
        """Return each metric over (answers, references)."""
        texts = [answer.answer for answer in answers]
        references = [answer.reference for answer in answers]
        return {name: float(metric(texts, references)) for name, metric in self.metrics.items()}

    def _batch_size(self, model: nn.Module) -> int:
        """Return the prompts of a batch: prompts with images, and models with prompt learning, are given one by one."""
        has_images = any(prompt.inputs for prompt in self.prompts)
        return 1 if has_images or has_prompt_learning(model) else self.section.batch_size

    def _as_text(self, prompt: GenerationPrompt, answer: Sequence[int]) -> Answer:
        def decode(ids: Sequence[int]) -> str:
            return str(self.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()

        text = str(self.tokenizer.decode(list(prompt.input_ids), skip_special_tokens=False))
        return Answer(text, decode(answer), decode(prompt.reference_ids))


def load_metrics(names: Sequence[str]) -> dict[str, Metric]:
    """Return the metrics by their short names; raises UserError for one that cannot be imported."""
    metrics = {}
    for name in names:
        path = METRICS[name].implementation if name in METRICS else name
        try:
            metrics[name.rpartition(":")[2]] = import_attribute(path)
        except (ImportError, RegistryError, ValueError) as error:
            raise UserError(
                f"evaluate.generate.metrics: `{name}` cannot be imported ({error}). Write `exact_match` or "
                "`package.module:function`, importable from the folder in which you launch."
            ) from error
    return metrics


def exact_match(answers: Sequence[str], references: Sequence[str]) -> float:
    """Return the share of answers equal to their reference, surrounding blanks aside."""
    pairs = list(zip(answers, references, strict=True))
    return sum(answer.strip() == reference.strip() for answer, reference in pairs) / max(1, len(pairs))
