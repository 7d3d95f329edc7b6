"""Rules of `checkpoint:` and `run:`: checkpoints, the run's folder, and the command that ends a run."""

from collections.abc import Iterator

from finetune.config.formatting import closest_multiples, did_you_mean, format_list
from finetune.config.paths import is_url
from finetune.config.plugins import PLUGIN_PREFIX
from finetune.config.resume_keys import MUST_MATCH
from finetune.config.rules.evaluate import metric_problems
from finetune.config.run_config import RunConfig
from finetune.config.schema import node_at
from finetune.config.sections.checkpoint import NEVER_ALLOWED
from finetune.errors import Problem

SCHEMES = ("s3", "gs", "gcs", "abfs", "az", "memory")
"""Object storage that runs are uploaded to; `memory` exists only as long as its process."""


def kept_checkpoints_are_written(config: RunConfig) -> Iterator[Problem]:
    """`keep_every_steps` is a multiple of `every_steps`."""
    every, kept = config.checkpoint.every_steps, config.checkpoint.keep_every_steps
    if kept is None:
        return
    if every is None:
        message = "no checkpoints are saved during training. Set `checkpoint.every_steps`, or remove this."
        yield Problem("checkpoint.keep_every_steps", message)
    elif kept % every:
        message = (
            f"{kept} is not a multiple of `checkpoint.every_steps` ({every}), so most of these are never saved. "
            f"Nearest that are: {closest_multiples(kept, every)}."
        )
        yield Problem("checkpoint.keep_every_steps", message)


def keep_best_has_its_metric(config: RunConfig) -> Iterator[Problem]:
    """The metric of `keep_best` is evaluated at the saved steps, and its goal is right."""
    best, every = config.checkpoint.keep_best, config.checkpoint.every_steps
    if best is None:
        return
    if every is None:
        message = "no checkpoints are saved during training. Set `checkpoint.every_steps`, or remove `keep_best`."
        yield Problem("checkpoint.keep_best", message)
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
    can = [key for key in MUST_MATCH if key not in NEVER_ALLOWED]
    for index, name in enumerate(config.checkpoint.allow_changes):
        key = f"checkpoint.allow_changes.{index}"
        if name in NEVER_ALLOWED:
            yield Problem(key, f"`{name}` cannot be allowed: {NEVER_ALLOWED[name]}. Remove it.")
        elif name.startswith(PLUGIN_PREFIX):  # the digest of a plugin, perhaps of one that the job no longer has
            continue
        elif name not in can and node_at(name) is None:
            hint = did_you_mean(name, can) or "Use dotted keys, such as `train.learning_rate`."
            yield Problem(key, f"the key `{name}` does not exist. {hint}")
        elif name not in can:
            inside = [other for other in can if other.startswith(f"{name}.")]
            hint = f"List its keys one by one: {format_list(inside)}." if inside else "It may differ anyway. Remove it."
            yield Problem(key, f"`{name}` is not a key that a resume refuses. {hint}")


def run_url_is_supported(config: RunConfig) -> Iterator[Problem]:
    """A run at a URL uses supported storage, and a checkpoint to resume from is a folder."""
    folder, resume = config.run.folder, config.checkpoint.resume
    if is_url(folder):
        scheme, _, rest = folder.partition("://")
        if scheme == "file":
            yield Problem("run.folder", f"write a folder on this machine without `file://`: `{rest}`.")
        elif scheme not in SCHEMES:
            hint = did_you_mean(scheme, SCHEMES) or f"Supported: {format_list(SCHEMES[:-1])}."
            yield Problem("run.folder", f"the storage `{scheme}://` is not supported. {hint}")
        elif "/" not in rest.strip("/"):
            yield Problem("run.folder", f"`{folder}` is a whole bucket. Name a folder in it: `{scheme}://BUCKET/NAME`.")
        elif "@" in rest:
            yield Problem("run.folder", "secrets do not belong in a job file. Use the storage's environment variables.")
    if is_url(resume):
        message = (
            "a checkpoint at a URL cannot be resumed directly. Copy it to a folder, or set `run.folder` to "
            "its run's URL."
        )
        yield Problem("checkpoint.resume", message)


def idle_comes_after_the_hang_report(config: RunConfig) -> Iterator[Problem]:
    """`run.on_end` does not shut down a machine before the hang report is written."""
    section, hang = config.run.on_end_section, config.run.hang_after_seconds
    if section is None or "idle" not in section.when or hang is None or section.idle_after_seconds > hang:
        return
    message = (
        f"a run without progress is idle after {section.idle_after_seconds:g} s, but its processes report a hang only "
        f"after {hang:g} s (`run.hang_after_seconds`). Write `idle_after_seconds: {2 * hang:g}`, or leave `idle` out "
        "of `when`."
    )
    is_written = "idle_after_seconds" in section.model_fields_set
    yield Problem("run.on_end.idle_after_seconds" if is_written else "run.on_end", message)


CHECKPOINT_RULES = (
    kept_checkpoints_are_written,
    keep_best_has_its_metric,
    allow_changes_names_refused_keys,
    run_url_is_supported,
    idle_comes_after_the_hang_report,
)
