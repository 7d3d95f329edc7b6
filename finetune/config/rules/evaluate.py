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
}
"""Which way is better for the metrics of the house."""

TOKEN_METRICS = ("loss", "perplexity", "token_accuracy")

_PAIR_METRICS = ("loss", "preference_accuracy", "reward_margin", "reward_chosen", "reward_rejected")

METRICS_OF_TASK: Mapping[str, tuple[str, ...]] = {
    "reward": _PAIR_METRICS,
    "masked_lm": ("loss", "perplexity", "masked_accuracy"),
    "distillation": (*TOKEN_METRICS, "cross_entropy", "divergence"),
    "image_classification": ("loss", "accuracy", "macro_f1", "top5_accuracy"),
    "token_classification": ("loss", "accuracy", "macro_f1", "entity_f1", "entity_precision", "entity_recall"),
}
"""What an evaluation of the task measures beside the model's answers; of tasks that are not here, OF_TOKENS."""

METRICS_OF_CLASSIFICATION: Mapping[str, tuple[str, ...]] = {
    "single_label": ("loss", "accuracy", "macro_f1", "micro_f1", "mcc"),
    "multi_label": ("loss", "subset_accuracy", "macro_f1", "micro_f1"),
    "regression": ("loss", "mse", "pearson", "spearman"),
}
"""What `text_classification` measures, by `task.classification.kind`."""


def metrics_of(config: RunConfig) -> tuple[str, ...]:
    """Return the metrics of every evaluation of this job, beside those of the model's answers."""
    if config.task.name == "text_classification":
        return METRICS_OF_CLASSIFICATION[config.task.classification.kind]
    if config.task.name == "preference":
        is_kto = config.task.preference.loss == "kto"
        more = ("reference_point",) if is_kto else ("log_probability_chosen", "log_probability_rejected")
        return (*_PAIR_METRICS, *more)
    return METRICS_OF_TASK.get(config.task.name, TOKEN_METRICS)


def evaluation_has_rows(config: RunConfig) -> Iterator[Problem]:
    """Evaluation and validation rows come together."""
    validation = config.data.validation
    if config.evaluate is not None and validation is None:
        yield Problem("evaluate", "there are no rows to evaluate on. Write `data.validation`, or remove `evaluate`.")
    if config.evaluate is None and validation is not None:
        message = "nothing evaluates these rows. Write `evaluate: {}` to measure at the end, or remove them."
        yield Problem("data.validation", message)


def generation_metrics_are_known(config: RunConfig) -> Iterator[Problem]:
    """A metric of the answers is one of ours or a function."""
    generate = config.evaluate.generate if config.evaluate else None
    for index, name in enumerate(generate.metrics if generate else ()):
        if name != "exact_match" and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
            hint = did_you_mean(name, ["exact_match"]) or "Write `exact_match` or `package.module:function`."
            yield Problem(f"evaluate.generate.metrics.{index}", f"there is no metric `{name}`. {hint}")


def early_stopping_has_its_metric(config: RunConfig) -> Iterator[Problem]:
    """Early stopping has evaluations during training, its metric is among what they measure, its goal is the best."""
    stopping = config.train.early_stopping
    if stopping is not None:
        key = "train.early_stopping"
        yield from metric_problems(config, stopping.metric, goal=stopping.goal, key=key, does="stops")


def metric_problems(config: RunConfig, metric: str, *, goal: str, key: str, does: str) -> Iterator[Problem]:
    """Yield what keeps the section `key` from following this metric during training; `does` is what a wrong goal does.

    It needs evaluations during training that measure the metric, and the goal that is better for one of the house.
    """
    if config.evaluate is None or config.evaluate.every_steps is None:
        name = key.rpartition(".")[2]
        yield Problem(key, f"nothing is evaluated during training. Write `evaluate.every_steps`, or remove `{name}`.")
        return
    generate = config.evaluate.generate
    answered = [name.rpartition(":")[2] for name in generate.metrics] if generate else []
    known = [*metrics_of(config), *answered]
    if metric not in known:
        hint = did_you_mean(metric, known) or f"It measures {format_list(known)}."
        if metric == "exact_match":
            hint = "Write `evaluate.generate` so that the model answers."
        yield Problem(f"{key}.metric", f"the evaluation does not measure `{metric}`. {hint}")
    better = GOALS.get(metric)
    if better is not None and goal != better:
        message = f"`{goal}` {does} when `{metric}` gets better. Write `goal: {better}`."
        yield Problem(f"{key}.goal", message)


EVALUATION_RULES = (evaluation_has_rows, generation_metrics_are_known, early_stopping_has_its_metric)
