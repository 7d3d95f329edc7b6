"""Rules of `checkpoint:` and of where a run lives: what is kept can exist, and what is allowed can be changed."""

from collections.abc import Iterator

from finetune.config.formatting import closest_multiples, did_you_mean, format_list
from finetune.config.paths import is_url
from finetune.config.resume_keys import MUST_MATCH
from finetune.config.rules.evaluate import metric_problems
from finetune.config.run_config import RunConfig
from finetune.config.schema import node_at
from finetune.config.sections.checkpoint import NEVER_ALLOWED
from finetune.errors import Problem

SCHEMES = ("s3", "gs", "gcs", "abfs", "az", "memory")
"""Kinds of object storage that runs are mirrored to; `memory` lives as long as its process."""


def kept_checkpoints_are_written(config: RunConfig) -> Iterator[Problem]:
    """What `keep_every_steps` keeps is among what `every_steps` saves."""
    every, kept = config.checkpoint.every_steps, config.checkpoint.keep_every_steps
    if kept is None:
        return
    if every is None:
        message = "nothing is saved during training. Write `checkpoint.every_steps`, or remove this."
        yield Problem("checkpoint.keep_every_steps", message)
    elif kept % every:
        message = (
            f"{kept} is not a multiple of `checkpoint.every_steps` ({every}), so most of these are never written. "
            f"Nearest that are: {closest_multiples(kept, every)}."
        )
        yield Problem("checkpoint.keep_every_steps", message)


def keep_best_has_its_metric(config: RunConfig) -> Iterator[Problem]:
    """`keep_best` has evaluations at steps that are saved, of its metric, with the right goal."""
    best, every = config.checkpoint.keep_best, config.checkpoint.every_steps
    if best is None:
        return
    if every is None:
        message = "nothing is saved during training. Write `checkpoint.every_steps`, or remove `keep_best`."
        yield Problem("checkpoint.keep_best", message)
    yield from metric_problems(config, best.metric, goal=best.goal, key="checkpoint.keep_best", does="keeps the worst")
    evaluated = config.evaluate.every_steps if config.evaluate else None
    if every is not None and evaluated is not None and every % evaluated and evaluated % every:
        message = (
            f"an evaluation every {evaluated} steps judges few of the checkpoints of every {every} steps. "
            f"Write `evaluate.every_steps: {every}`, or one number that is a multiple of the other."
        )
        yield Problem("checkpoint.keep_best", message)


def allow_changes_names_refused_keys(config: RunConfig) -> Iterator[Problem]:
    """`allow_changes` names keys that would otherwise be refused, and that can be continued when they differ."""
    can = [key for key in MUST_MATCH if key not in NEVER_ALLOWED]
    for index, name in enumerate(config.checkpoint.allow_changes):
        place = f"checkpoint.allow_changes.{index}"
        if name in NEVER_ALLOWED:
            yield Problem(place, f"`{name}` cannot be allowed: {NEVER_ALLOWED[name]}. Remove it.")
        elif name not in can and node_at(name) is None:
            hint = did_you_mean(name, can) or "Write dotted keys, such as `train.learning_rate`."
            yield Problem(place, f"there is no key `{name}`. {hint}")
        elif name not in can:
            inside = [key for key in can if key.startswith(f"{name}.")]
            hint = f"Name its keys one by one: {format_list(inside)}." if inside else "It may change anyway. Remove it."
            yield Problem(place, f"`{name}` is not a key that a resume refuses. {hint}")


def run_url_is_supported(config: RunConfig) -> Iterator[Problem]:
    """A run at a URL is at a kind of storage that is known, and a checkpoint to continue from is a folder."""
    folder, resume = config.run.folder, config.checkpoint.resume
    if is_url(folder):
        scheme, _, rest = folder.partition("://")
        if scheme == "file":
            yield Problem("run.folder", f"a folder of this machine is written without `file://`: `{rest}`.")
        elif scheme not in SCHEMES:
            hint = did_you_mean(scheme, SCHEMES) or f"There are {format_list(SCHEMES[:-1])}."
            yield Problem("run.folder", f"there is no storage `{scheme}://`. {hint}")
        elif "/" not in rest.strip("/"):
            yield Problem(
                "run.folder", f"`{folder}` is a whole bucket. Write a folder in it: `{scheme}://BUCKET/NAME`."
            )
        elif "@" in rest:
            yield Problem("run.folder", "secrets do not belong in a job file. Set the storage's environment variables.")
    if is_url(resume):
        message = "a checkpoint at a URL cannot be named. Copy it to a folder, or write its run's URL in `run.folder`."
        yield Problem("checkpoint.resume", message)


CHECKPOINT_RULES = (
    kept_checkpoints_are_written,
    keep_best_has_its_metric,
    allow_changes_names_refused_keys,
    run_url_is_supported,
)
