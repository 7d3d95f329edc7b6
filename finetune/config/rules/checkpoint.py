"""Rules of `evaluate:`, `checkpoint:` and `run:`: metrics, checkpoints, a run's folder, and the command at its end."""

import re
from collections.abc import Iterator, Mapping

from finetune.config.formatting import closest_multiples, did_you_mean, format_list
from finetune.config.paths import is_url
from finetune.config.plugins import PLUGIN_PREFIX
from finetune.config.resume_keys import all_keys_to_match
from finetune.config.rules.sources import storage_problems
from finetune.config.run_config import RunConfig
from finetune.config.sections.checkpoint import NEVER_ALLOWED
from finetune.errors import Problem
from finetune.registry.losses import EMBEDDING_LOSSES, PREFERENCE_LOSSES, RERANKING_LOSSES
from finetune.registry.tasks import METRICS, TASKS

_SCORE_METRICS = ("loss", "mse", "pearson", "spearman")

_METRICS_OF_OTHER_KINDS: Mapping[str, tuple[str, ...]] = {
    "multi_label": ("loss", "subset_accuracy", "macro_f1", "micro_f1"),
    "regression": _SCORE_METRICS,
}
"""Metrics of `text_classification` where `task.classification.kind` is not `single_label`."""


def evaluation_metrics(config: RunConfig) -> tuple[str, ...]:
    """Return the metrics of every evaluation of this job, without the metrics of generated answers."""
    task, section = TASKS[config.task.name], config.task
    if task.sample == "tokens_and_label":
        return _METRICS_OF_OTHER_KINDS.get(section.classification.kind, task.metrics)
    if task.name == "preference":
        return (*task.metrics, *PREFERENCE_LOSSES[section.preference.loss].metrics)
    if task.name in ("embedding", "reranking"):
        losses = (EMBEDDING_LOSSES[section.embedding.loss], RERANKING_LOSSES[section.reranking.loss])
        return _SCORE_METRICS if any(loss.scores is not None for loss in losses) else task.metrics
    return task.metrics


def evaluation_fits(config: RunConfig) -> Iterator[Problem]:
    """There are rows to evaluate, metrics of answers exist, and that of early stopping is measured."""
    validation = config.data.validation
    if config.evaluate is not None and validation is None:
        yield Problem("evaluate", "there are no validation rows. Add `data.validation`, or remove `evaluate`.")
    if config.evaluate is None and validation is not None:
        message = "these rows are never evaluated. Add `evaluate: {}` to evaluate at the end, or remove them."
        yield Problem("data.validation", message)
    generate = config.evaluate.generate if config.evaluate else None
    for index, name in enumerate(generate.metrics if generate else ()):
        known = [entry.name for entry in METRICS if entry.is_of_answers]
        if name not in known and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
            hint = did_you_mean(name, known) or f"Write {format_list(known)} or `package.module:function`."
            yield Problem(f"evaluate.generate.metrics.{index}", f"the metric `{name}` does not exist. {hint}")
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
    known = [*evaluation_metrics(config), *answered]
    if metric not in known:
        hint = did_you_mean(metric, known) or f"It computes {format_list(known)}."
        if metric == "exact_match":
            hint = "Add `evaluate.generate`, which generates answers."
        yield Problem(f"{key}.metric", f"the evaluation does not compute `{metric}`. {hint}")
    better = METRICS[metric].goal if metric in METRICS else goal
    if goal != better:
        message = f"`{goal}` {does} when `{metric}` improves. Write `goal: {better}`."
        yield Problem(f"{key}.goal", message)


SCHEMES = ("s3", "gs", "gcs", "abfs", "az", "memory")
"""Object storage that runs are uploaded to; `memory` exists only as long as its process."""


def kept_checkpoints_are_written(config: RunConfig) -> Iterator[Problem]:
    """`keep_every_steps` is a multiple of `every_steps`; the metric of `keep_best` is evaluated at the saved steps."""
    every, kept, best = config.checkpoint.every_steps, config.checkpoint.keep_every_steps, config.checkpoint.keep_best
    missing = "no checkpoints are saved during training. Set `checkpoint.every_steps`, or remove"
    if kept is not None and every is None:
        yield Problem("checkpoint.keep_every_steps", f"{missing} this.")
    elif kept is not None and every is not None and kept % every:
        message = (
            f"{kept} is not a multiple of `checkpoint.every_steps` ({every}), so most of these are never saved. "
            f"Nearest multiples: {closest_multiples(kept, every)}."
        )
        yield Problem("checkpoint.keep_every_steps", message)
    if best is None:
        if config.export.checkpoint == "best":
            message = "no checkpoint is kept for being the best. Add `checkpoint.keep_best` with its metric."
            yield Problem("export.checkpoint", message)
        return
    if every is None:
        yield Problem("checkpoint.keep_best", f"{missing} `keep_best`.")
    yield from metric_problems(config, best.metric, goal=best.goal, key="checkpoint.keep_best", does="keeps the worst")
    evaluated = config.evaluate.every_steps if config.evaluate else None
    if every is not None and evaluated is not None and every % evaluated and evaluated % every:
        message = (
            f"evaluations every {evaluated} steps cover few of the checkpoints every {every} steps. "
            f"Write `evaluate.every_steps: {every}`, or make one a multiple of the other."
        )
        yield Problem("checkpoint.keep_best", message)


def allow_changes_names_refused_keys(config: RunConfig) -> Iterator[Problem]:
    """`allow_changes` names keys that a resume refuses, and that can be resumed from when they differ."""
    can = [key for key in all_keys_to_match() if key not in NEVER_ALLOWED] if config.checkpoint.allow_changes else []
    for index, name in enumerate(config.checkpoint.allow_changes):
        key = f"checkpoint.allow_changes.{index}"
        if name in NEVER_ALLOWED:
            yield Problem(key, f"`{name}` cannot be allowed: {NEVER_ALLOWED[name]}. Remove it.")
        elif name not in can and not name.startswith(PLUGIN_PREFIX):  # perhaps of a plugin that the job no longer has
            inside = [other for other in can if other.startswith(f"{name}.")]
            hint = (
                did_you_mean(name, can) or "Only keys that a resume refuses are listed, such as `train.learning_rate`."
            )
            hint = f"List its keys one by one: {format_list(inside)}." if inside else hint
            yield Problem(key, f"`{name}` is not a key that a resume refuses. {hint}")


def run_url_is_supported(config: RunConfig) -> Iterator[Problem]:
    """A run at a URL uses supported storage, and a checkpoint to resume from is a folder."""
    folder, resume = config.run.folder, config.checkpoint.resume
    if is_url(folder):
        scheme, _, rest = folder.partition("://")
        yield from storage_problems("run.folder", folder, schemes=SCHEMES)
        if scheme in SCHEMES and "/" not in rest.strip("/"):
            yield Problem("run.folder", f"`{folder}` is a whole bucket. Name a folder in it: `{scheme}://BUCKET/NAME`.")
    if is_url(resume):
        message = "a checkpoint at a URL cannot be resumed. Copy it to a folder, or set `run.folder` to its run's URL."
        yield Problem("checkpoint.resume", message)


RULES = (
    evaluation_fits,
    kept_checkpoints_are_written,
    allow_changes_names_refused_keys,
    run_url_is_supported,
)
