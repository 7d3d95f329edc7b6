"""Rules of `evaluate:` and of the keys that need an evaluation."""

import re
from collections.abc import Iterator, Mapping

from finetune.config.formatting import did_you_mean, format_list
from finetune.config.run_config import RunConfig
from finetune.errors import Problem
from finetune.registry.losses import EMBEDDING_LOSSES, PREFERENCE_LOSSES, RERANKING_LOSSES
from finetune.registry.metrics import METRICS
from finetune.registry.tasks import TASKS

_SCORE_METRICS = ("loss", "mse", "pearson", "spearman")

_METRICS_OF_OTHER_KINDS: Mapping[str, tuple[str, ...]] = {
    "multi_label": ("loss", "subset_accuracy", "macro_f1", "micro_f1"),
    "regression": _SCORE_METRICS,
}
"""Metrics of `text_classification` where `task.classification.kind` is not `single_label`."""


def metrics_of(config: RunConfig) -> tuple[str, ...]:
    """Return the metrics of every evaluation of this job, apart from those of generated answers."""
    task, section = TASKS[config.task.name], config.task
    if task.sample == "tokens_and_label":
        return _METRICS_OF_OTHER_KINDS.get(section.classification.kind, task.metrics)
    if task.name == "preference":
        return (*task.metrics, *PREFERENCE_LOSSES[section.preference.loss].metrics)
    if task.name in ("embedding", "reranking"):
        losses = (EMBEDDING_LOSSES[section.embedding.loss], RERANKING_LOSSES[section.reranking.loss])
        return _SCORE_METRICS if any(loss.scores is not None for loss in losses) else task.metrics
    return task.metrics


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
        known = [entry.name for entry in METRICS if entry.is_of_answers]
        if name not in known and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
            hint = did_you_mean(name, known) or f"Write {format_list(known)} or `package.module:function`."
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
    better = METRICS[metric].goal if metric in METRICS else goal
    if goal != better:
        message = f"`{goal}` {does} when `{metric}` improves. Write `goal: {better}`."
        yield Problem(f"{key}.goal", message)


EVALUATION_RULES = (evaluation_has_rows, generation_metrics_are_known, early_stopping_has_its_metric)
