"""Rules of `evaluate:` and of what waits for an evaluation."""

import re
from collections.abc import Iterator, Mapping

from finetune.config.run_config import RunConfig
from finetune.config.wording import did_you_mean, listed
from finetune.errors import Problem

GOALS: Mapping[str, str] = {
    "loss": "minimize",
    "perplexity": "minimize",
    "token_accuracy": "maximize",
    "exact_match": "maximize",
}
"""Which way is better for the metrics of the house."""

ALWAYS_MEASURED = ("loss", "perplexity", "token_accuracy")


def evaluation_has_rows(config: RunConfig) -> Iterator[Problem]:
    """Evaluation and validation rows come together."""
    validation = config.data.validation
    if config.evaluate is not None and validation is None:
        yield Problem("evaluate", "there are no rows to evaluate on. Write `data.validation`, or remove `evaluate`.")
    if config.evaluate is None and validation is not None:
        message = "nothing evaluates these rows. Write `evaluate: {}` to measure at the end, or remove them."
        yield Problem("data.validation", message)


def metrics_can_be_found(config: RunConfig) -> Iterator[Problem]:
    """A metric of the answers is one of ours or a function."""
    generate = config.evaluate.generate if config.evaluate else None
    for index, name in enumerate(generate.metrics if generate else ()):
        if name != "exact_match" and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
            hint = did_you_mean(name, ["exact_match"]) or "Write `exact_match` or `package.module:function`."
            yield Problem(f"evaluate.generate.metrics.{index}", f"there is no metric `{name}`. {hint}")


def early_stopping_is_fed(config: RunConfig) -> Iterator[Problem]:
    """Early stopping has evaluations during training, and its metric is among what they measure."""
    stopping = config.train.early_stopping
    if stopping is None:
        return
    if config.evaluate is None or config.evaluate.every_steps is None:
        message = "nothing is evaluated during training. Write `evaluate.every_steps`, or remove `early_stopping`."
        yield Problem("train.early_stopping", message)
        return
    generate = config.evaluate.generate
    answered = [name.rpartition(":")[2] for name in generate.metrics] if generate else []
    known = [*ALWAYS_MEASURED, *answered]
    if stopping.metric not in known:
        hint = did_you_mean(stopping.metric, known) or f"It measures {listed(known)}."
        if stopping.metric == "exact_match":
            hint = "Write `evaluate.generate` so that the model answers."
        message = f"the evaluation does not measure `{stopping.metric}`. {hint}"
        yield Problem("train.early_stopping.metric", message)


def goal_is_the_better_way(config: RunConfig) -> Iterator[Problem]:
    """A metric of the house is not stopped at its best."""
    stopping = config.train.early_stopping
    better = GOALS.get(stopping.metric) if stopping else None
    if stopping and better is not None and stopping.goal != better:
        message = f"`{stopping.goal}` stops when `{stopping.metric}` gets better. Write `goal: {better}`."
        yield Problem("train.early_stopping.goal", message)


EVALUATION_RULES = (evaluation_has_rows, metrics_can_be_found, early_stopping_is_fed, goal_is_the_better_way)
