"""The metrics of evaluations, by which a run can stop early or keep its best checkpoints."""

from dataclasses import dataclass
from typing import Literal

from finetune.registry.table import Entry, Table


@dataclass(frozen=True, kw_only=True)
class MetricEntry(Entry):
    """A metric. One of generated answers has an implementation, others are computed by their task."""

    goal: Literal["minimize", "maximize"] = "maximize"

    @property
    def is_of_answers(self) -> bool:
        """Return whether `evaluate.generate.metrics` can name it: a function of answers and references."""
        return bool(self.implementation)


METRICS = Table(
    "metric",
    MetricEntry,
    (
        MetricEntry(name="loss", goal="minimize"),
        MetricEntry(name="perplexity", goal="minimize"),
        MetricEntry(name="mse", goal="minimize"),
        MetricEntry(name="cross_entropy", goal="minimize"),
        MetricEntry(name="divergence", goal="minimize"),
        MetricEntry(name="token_accuracy"),
        MetricEntry(name="exact_match", implementation="finetune.task.generation:exact_match"),
        MetricEntry(name="accuracy"),
        MetricEntry(name="subset_accuracy"),
        MetricEntry(name="top5_accuracy"),
        MetricEntry(name="macro_f1"),
        MetricEntry(name="micro_f1"),
        MetricEntry(name="mcc"),
        MetricEntry(name="pearson"),
        MetricEntry(name="spearman"),
        MetricEntry(name="entity_f1"),
        MetricEntry(name="entity_precision"),
        MetricEntry(name="entity_recall"),
        MetricEntry(name="masked_accuracy"),
        MetricEntry(name="preference_accuracy"),
        MetricEntry(name="reward_margin"),
        MetricEntry(name="recall_at_1"),
        MetricEntry(name="recall_at_5"),
        MetricEntry(name="recall_at_10"),
        MetricEntry(name="ndcg_at_10"),
        MetricEntry(name="mrr_at_10"),
    ),
)
"""Metrics that are not here, such as a mean reward, can be minimized or maximized."""
