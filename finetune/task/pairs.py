"""What tasks that learn from answers share: how rows become samples, and sums over pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from finetune.data.batch import Batch
from finetune.data.encoding.answers import AnswersEncoder
from finetune.data.encoding.chat import require_chat_template
from finetune.data.encoding.encode import ConversationEncoder
from finetune.data.features import Features
from finetune.data.prepared.sequences import SequencesPolicy
from finetune.task.base import BaseTask
from finetune.task.causal import pad_id
from finetune.task.materials import Materials
from finetune.task.sequences import COUNTS, halves


class PairsTask(BaseTask):
    """Learns from answers of which one is preferred; raises DataError for a tokenizer without chat template.

    Rows become several sequences, each the prompt and one answer; a target of a batch is a pair.
    """

    def __init__(self, materials: Materials, *, judged: bool = False, margin: bool = False) -> None:
        require_chat_template(materials.tokenizer)
        data = materials.data
        self.pad_id = pad_id(materials.tokenizer)
        self._data = data
        encode = ConversationEncoder(
            materials.tokenizer,
            system_prompt=data.system_prompt,
            template=data.chat_template,
            allow_special_tokens=data.allow_special_tokens,
        )
        name = f"`task.name: {materials.section.name}`"
        self._answers = self._encoder = AnswersEncoder(encode, name, judged=judged, margin=margin)

    @property
    def encoding(self) -> Mapping[str, Any]:
        """Return what samples hold beside the answers."""
        held = {"judged": self._answers.judged, "margin": self._answers.margin}
        return {name: True for name, is_held in held.items() if is_held}

    @property
    def lengths(self) -> SequencesPolicy:
        """Return that `data.max_length` holds for the prompt with each answer."""
        return SequencesPolicy(self._data.longest, self._data.over_length, self._data.truncate_side)

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return chosen answers and below them rejected ones: they share one forward pass."""
        return halves(features, pad_id=self.pad_id)

    def filler(self, features: Features) -> Batch:
        """Return the sample as a batch in which nothing counts."""
        batch = super().filler(features)
        return replace(batch, extras={**batch.extras, COUNTS: torch.zeros_like(batch.extras[COUNTS])})


def pair_sums(losses: Tensor, chosen: Tensor, rejected: Tensor, *, counts: Tensor) -> dict[str, Tensor]:
    """Return the sums of the losses and, detached, of both rewards and of how often the chosen one is higher.

    All are [pairs]; `counts` is 0 for a pair that does not count, else 1.
    """
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "loss_sum": (losses * counts).sum(),
        "reward_chosen": (chosen * counts).sum(),
        "reward_rejected": (rejected * counts).sum(),
        "reward_margin": ((chosen - rejected) * counts).sum(),
        "preference_accuracy": ((chosen > rejected) * counts).sum(),
    }


def pair_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the means over `num_pairs` of all other sums, the loss among them; NaN without pairs."""
    num_pairs = sums["num_pairs"] or float("nan")
    names = {name: "loss" if name == "loss_sum" else name for name in sums if name != "num_pairs"}
    return {title: sums[name] / num_pairs for name, title in names.items()}
