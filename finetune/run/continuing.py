"""Where a run continues from, and what it says of it."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from finetune.checkpoint.access import build_access
from finetune.checkpoint.ahead import Ahead
from finetune.checkpoint.checkpointer import Checkpointer
from finetune.checkpoint.facts import RunFacts
from finetune.checkpoint.layout import CHECKPOINTS
from finetune.config.run_config import RunConfig
from finetune.report.announcer import Announcer
from finetune.run.identity import run_facts
from finetune.run.lessons import Lessons
from finetune.run.machine import Machine
from finetune.run.over import BEST_IS_OF
from finetune.run.samples import refuse_other_samples
from finetune.run.settling import settle_buckets
from finetune.runtime.progress import Progress


def continue_run(
    config: RunConfig, machine: Machine, *, strategy: str, lessons: Lessons, ahead: Ahead | None, say: Announcer
) -> tuple[Checkpointer, Progress]:
    """Return the checkpoints and how far the run has come, its state back in model and optimizer. Collective."""
    facts = run_facts(config, lessons, model=machine.plain_model, strategy=strategy, say=say)
    access = build_access(machine.accelerator, machine.model, machine.optimizer)
    checkpointer = Checkpointer(
        _folder(config), section=config.checkpoint, access=access, run=facts, say=say, ahead=ahead
    )
    found = checkpointer.find()
    if found is None:
        if config.checkpoint.allow_changes:
            say("checkpoint.allow_changes: nothing is continued, so there is nothing to allow")
        return checkpointer, Progress()
    if found.step > 0:
        sample = lessons.sample_at(found.step * config.train.global_batch_size)
        batch = lessons.task.collate([sample]).to(machine.accelerator.device)
        loss = partial(lessons.task.loss_sum, machine.model, batch)
        settle_buckets(machine.accelerator, machine.model, loss=loss)
    progress = Progress.from_state_dict(checkpointer.load(found))
    batch_size = config.train.global_batch_size
    refuse_other_samples(found.path, progress, pool=lessons.training, global_batch_size=batch_size)
    saved = found.manifest.run
    forget_other_best(progress, saved, here=facts)
    say(f"continues from {found.path} after step {progress.step}")
    position = progress.step * batch_size
    scales = bool(access.loss_scale.read()), saved.identity.get("train.precision") == facts.identity["train.precision"]
    for sentence in (*what_is_back(position, scales=scales), *what_differs(saved, here=facts)):
        say(sentence)
    return checkpointer, progress


def forget_other_best(progress: Progress, saved: RunFacts, *, here: RunFacts) -> None:
    """Have early stopping begin anew where the best so far is of another metric or goal."""
    if any(saved.settings.get(name) != here.settings.get(name) for name in BEST_IS_OF):
        progress.best_metric, progress.evaluations_since_best = None, 0


def what_is_back(position: int, *, scales: tuple[bool, bool]) -> Iterator[str]:
    """Yield what came out of the checkpoint and what is worked out anew; `scales`: is the loss, and was it then?"""
    scales_now, scaled_then = scales
    also = ", step and loss scale" if scales_now and scaled_then else " and step"
    begins = "; the loss scale begins anew: there was none" if scales_now and not scaled_then else ""
    yield f"restored: parameters, optimizer state{also}{begins}"
    yield (
        "derived: random numbers from seed, step and rank; learning rate from the step; "
        f"data position {position:,} from step x global batch"
    )


def what_differs(saved: RunFacts, *, here: RunFacts) -> Iterator[str]:
    """Yield what another strategy or number of processes means for the numbers to come; nothing where both are same."""
    there = saved.origin
    if there == here.origin or not there:
        return
    masks = ""
    if there["processes"] != here.origin["processes"]:
        masks = f"dropout masks are those of {_processes(here)}, "
    yield (
        f"written under {there['strategy']} on {_processes(saved)}, continued under {here.origin['strategy']} on "
        f"{_processes(here)}: {masks}sums are rounded in another order: same losses within rounding, not to the bit"
    )


def _folder(config: RunConfig) -> Path:
    return Path(config.run.folder) / CHECKPOINTS


def _processes(facts: RunFacts) -> str:
    count = facts.origin["processes"]
    return f"{count} process{'' if count == '1' else 'es'}"
