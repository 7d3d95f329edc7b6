"""Where a run resumes from, what it logs about that, and whether there is anything left to do.

The same command on a finished run is a success that does nothing.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from finetune.checkpoint.checkpointer import Checkpointer
from finetune.checkpoint.format.manifest import RunFingerprint
from finetune.checkpoint.read.checksum_prefetch import ChecksumPrefetch
from finetune.checkpoint.sharding.access import build_access
from finetune.config.run_config import RunConfig
from finetune.report.run_log import RunLog
from finetune.run.build.data import TrainingData
from finetune.run.build.prepared_model import PreparedModel
from finetune.run.samples import require_same_samples
from finetune.run.state.fingerprint import facts_with, run_facts
from finetune.run.state.finished import BEST_METRIC_KEYS, FinishedRun, format_finished, read_finished_run
from finetune.runtime.distributed import run_on_rank_0
from finetune.runtime.progress import Progress
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER
from finetune.strategy.upstream import warm_up_ddp_buckets


def find_finished(
    config: RunConfig, training_data: TrainingData, *, num_steps: int, strategy: str, log: RunLog
) -> FinishedRun | None:
    """Return the run if its last checkpoint is whole by size and `final/` is from it; else it is for `resume_run`.

    What is used of the checkpoint here is compared with its digest, too.

    Needs no model. Raises CheckpointError where the config is no longer the one it was trained with. Collective.
    """
    found = run_on_rank_0(lambda: read_finished_run(config, num_steps=num_steps))
    if found is None:
        return None
    finished, manifest = found
    told = manifest.run.identity
    base, adapter, teacher = told.get("base weights"), told.get("first adapter"), told.get("teacher")
    wanted = facts_with(base, config, training_data, strategy=strategy, adapter=adapter, teacher=teacher)
    sentences = format_finished(config, finished, manifest.run, wanted=wanted)
    for sentence in sentences or ():
        log(sentence)
    return finished if sentences is not None else None


def resume_run(
    config: RunConfig,
    prepared: PreparedModel,
    *,
    strategy: str,
    training_data: TrainingData,
    checksums: ChecksumPrefetch | None,
    log: RunLog,
) -> tuple[Checkpointer, Progress]:
    """Return the checkpoints and how far the run has come, its state back in model and optimizer. Collective."""
    facts = run_facts(config, training_data, model=prepared.unwrapped_model, strategy=strategy, log=log)
    access = build_access(prepared.accelerator, prepared.model, prepared.optimizer)
    checkpointer = Checkpointer(
        _folder(config), section=config.checkpoint, access=access, run=facts, log=log, checksums=checksums
    )
    found = checkpointer.find()
    if found is None:
        if config.checkpoint.allow_changes:
            log("checkpoint.allow_changes: nothing is continued, so there is nothing to allow")
        return checkpointer, Progress()
    if found.step > 0:
        sample = training_data.sample_at(found.step * config.train.global_batch_size)
        batch = training_data.task.collate([sample]).to(prepared.accelerator.device)
        loss_sums = partial(training_data.task.loss_sums, prepared.model, batch)
        warm_up_ddp_buckets(prepared.accelerator, prepared.model, loss=lambda: loss_sums()["loss_sum"])
    progress = Progress.from_state_dict(checkpointer.load(found))
    batch_size = config.train.global_batch_size
    require_same_samples(found.path, progress, pool=training_data.training, global_batch_size=batch_size)
    saved = found.manifest.run
    reset_incomparable_best(progress, saved, current=facts)
    log(f"continues from {found.path} after step {progress.step}")
    position = progress.step * batch_size
    scales = bool(access.loss_scale.read()), saved.identity.get("train.precision") == facts.identity["train.precision"]
    for sentence in (*format_restored(position, scales=scales), *format_strategy_change(saved, current=facts)):
        log(sentence)
    return checkpointer, progress


def reset_incomparable_best(progress: Progress, saved: RunFingerprint, *, current: RunFingerprint) -> None:
    """Have early stopping begin anew where the best so far is of another metric or goal."""
    if any(saved.settings.get(name) != current.settings.get(name) for name in BEST_METRIC_KEYS):
        progress.best_metric, progress.evaluations_since_best = None, 0


def format_restored(position: int, *, scales: tuple[bool, bool]) -> Iterator[str]:
    """Yield what came out of the checkpoint and what is worked out anew; `scales`: is the loss, and was it then?"""
    scales_now, scaled_then = scales
    also = ", step and loss scale" if scales_now and scaled_then else " and step"
    begins = "; the loss scale begins anew: there was none" if scales_now and not scaled_then else ""
    yield f"restored: parameters, optimizer state{also}{begins}"
    yield (
        "derived: random numbers from seed, step and rank; learning rate from the step; "
        f"data position {position:,} from step x global batch"
    )


def format_strategy_change(saved: RunFingerprint, *, current: RunFingerprint) -> Iterator[str]:
    """Yield what another strategy or number of processes means for the numbers to come; nothing where both are same."""
    there = saved.origin
    if there == current.origin or not there:
        return
    masks = ""
    if there["processes"] != current.origin["processes"]:
        masks = f"dropout masks are those of {_processes(current)}, "
    yield (
        f"written under {there['strategy']} on {_processes(saved)}, continued under {current.origin['strategy']} on "
        f"{_processes(current)}: {masks}sums are rounded in another order: same losses within rounding, not to the bit"
    )


def _folder(config: RunConfig) -> Path:
    return Path(config.run.folder) / CHECKPOINTS_FOLDER


def _processes(facts: RunFingerprint) -> str:
    count = facts.origin["processes"]
    return f"{count} process{'' if count == '1' else 'es'}"
