"""Rules of `evaluate:` and of what depends on an evaluation."""

import re
from collections.abc import Iterator, Mapping

from finetune.config.formatting import did_you_mean, format_list
from finetune.config.run_config import RunConfig
from finetune.errors import Problem

GOALS: Mapping[str, str] = {
    **dict.fromkeys(("loss", "perplexity", "mse"), "minimize"),
    **dict.fromkeys(("token_accuracy", "exact_match", "accuracy", "subset_accuracy", "top5_accuracy"), "maximize"),
    **dict.fromkeys(("macro_f1", "micro_f1", "mcc", "pearson", "spearman"), "maximize"),
    **dict.fromkeys(("entity_f1", "entity_precision", "entity_recall"), "maximize"),
    **dict.fromkeys(("cross_entropy", "divergence"), "minimize"),
    "masked_accuracy": "maximize",
    **dict.fromkeys(("preference_accuracy", "reward_margin"), "maximize"),
    **dict.fromkeys(("recall_at_1", "recall_at_5", "recall_at_10", "ndcg_at_10", "mrr_at_10"), "maximize"),
}
"""The goal of each built-in metric."""

TOKEN_METRICS = ("loss", "perplexity", "token_accuracy")

_PAIR_METRICS = ("loss", "preference_accuracy", "reward_margin", "reward_chosen", "reward_rejected")

METRICS_OF_TASK: Mapping[str, tuple[str, ...]] = {
    "reward": _PAIR_METRICS,
    "masked_lm": ("loss", "perplexity", "masked_accuracy"),
    "distillation": (*TOKEN_METRICS, "cross_entropy", "divergence"),
    "image_classification": ("loss", "accuracy", "macro_f1", "top5_accuracy"),
    "token_classification": ("loss", "accuracy", "macro_f1", "entity_f1", "entity_precision", "entity_recall"),
}
"""Metrics of each task, apart from those of generated answers; TOKEN_METRICS for tasks that are not listed."""

_RANKING_METRICS = ("loss", "recall_at_1", "recall_at_5", "recall_at_10", "ndcg_at_10", "mrr_at_10")

_SCORE_METRICS = ("loss", "mse", "pearson", "spearman")

METRICS_OF_CLASSIFICATION: Mapping[str, tuple[str, ...]] = {
    "single_label": ("loss", "accuracy", "macro_f1", "micro_f1", "mcc"),
    "multi_label": ("loss", "subset_accuracy", "macro_f1", "micro_f1"),
    "regression": ("loss", "mse", "pearson", "spearman"),
}
"""What `text_classification` measures, by `task.classification.kind`."""


def metrics_of(config: RunConfig) -> tuple[str, ...]:
    """Return the metrics of every evaluation of this job, apart from those of generated answers."""
    if config.task.name == "text_classification":
        return METRICS_OF_CLASSIFICATION[config.task.classification.kind]
    if config.task.name == "preference":
        is_kto = config.task.preference.loss == "kto"
        more = ("reference_point",) if is_kto else ("log_probability_chosen", "log_probability_rejected")
        return (*_PAIR_METRICS, *more)
    if config.task.name in ("embedding", "reranking"):
        is_ranking = config.task.embedding.loss == "infonce" and config.task.reranking.loss in ("listwise", "pairwise")
        return _RANKING_METRICS if is_ranking else _SCORE_METRICS
    return METRICS_OF_TASK.get(config.task.name, TOKEN_METRICS)


def evaluation_has_rows(config: RunConfig) -> Iterator[Problem]:
    """`evaluate` and `data.validation` require each other."""
    validation = config.data.validation
    if config.evaluate is not None and validation is None:
        yield Problem("evaluate", "there are no validation rows. Add `data.validation`, or remove `evaluate`.")
    if config.evaluate is None and validation is not None:
        message = "these rows are never evaluated. Add `evaluate: {}` to evaluate at the end, or remove them."
        yield Problem("data.validation", message)


def generation_metrics_are_known(config: RunConfig) -> Iterator[Problem]:
    """A generation metric is built in or a function."""
    generate = config.evaluate.generate if config.evaluate else None
    for index, name in enumerate(generate.metrics if generate else ()):
        if name != "exact_match" and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
            hint = did_you_mean(name, ["exact_match"]) or "Write `exact_match` or `package.module:function`."
            yield Problem(f"evaluate.generate.metrics.{index}", f"the metric `{name}` does not exist. {hint}")


def early_stopping_has_its_metric(config: RunConfig) -> Iterator[Problem]:
    """Early stopping has evaluations during training that measure its metric, and the right goal."""
    stopping = config.train.early_stopping
    if stopping is not None:
        key = "train.early_stopping"
        yield from metric_problems(config, stopping.metric, goal=stopping.goal, key=key, does="stops")


def metric_problems(config: RunConfig, metric: str, *, goal: str, key: str, does: str) -> Iterator[Problem]:
    """Yield why the section `key` cannot use this metric during training; `does` is what a wrong goal would do.

    It needs evaluations during training that measure the metric, and the right goal for a built-in one.
    """
    if config.evaluate is None or config.evaluate.every_steps is None:
        name = key.rpartition(".")[2]
        yield Problem(key, f"there are no evaluations during training. Set `evaluate.every_steps`, or remove `{name}`.")
        return
    generate = config.evaluate.generate
    answered = [name.rpartition(":")[2] for name in generate.metrics] if generate else []
    known = [*metrics_of(config), *answered]
    if metric not in known:
        hint = did_you_mean(metric, known) or f"It computes {format_list(known)}."
        if metric == "exact_match":
            hint = "Add `evaluate.generate`, which generates answers."
        yield Problem(f"{key}.metric", f"the evaluation does not compute `{metric}`. {hint}")
    better = GOALS.get(metric)
    if better is not None and goal != better:
        message = f"`{goal}` {does} when `{metric}` improves. Write `goal: {better}`."
        yield Problem(f"{key}.goal", message)


EVALUATION_RULES = (evaluation_has_rows, generation_metrics_are_known, early_stopping_has_its_metric)
