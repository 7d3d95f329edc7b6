"""The checkpoint that a run resumes from, the log lines about it, and whether any steps are left.

The same command on a finished run is a success that does nothing.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import RunFingerprint
from finetune.checkpoint.read.changes import DATA, check_changes, is_other_cache_version
from finetune.checkpoint.read.checksum_prefetch import ChecksumPrefetch
from finetune.checkpoint.read.load import find_checkpoint, resume_checkpoint, verify_checkpoint
from finetune.checkpoint.sharding.access import build_access
from finetune.checkpoint.write.retention import best_steps, checkpoint_metrics
from finetune.config.resume_keys import keys_that_may_differ, keys_that_must_match
from finetune.config.run_config import RunConfig
from finetune.data.order.order import DatasetView
from finetune.data.token_cache.integrity import digest_of_step_ids, digest_of_steps
from finetune.data.token_cache.store import CACHE_VERSION
from finetune.errors import CheckpointError
from finetune.model.frozen_models import base_digest
from finetune.model.loading.pretrained import adapter_digest
from finetune.report.reporter import RunLog
from finetune.run.context import RunContext
from finetune.run.setup.build import BuiltRun, RestoredRun
from finetune.run.setup.model_problems import recorded_layout
from finetune.run.setup.precompute import teacher_identity
from finetune.run.setup.training_data import PreparedData, TrainingData, input_identity
from finetune.run.state.finished import FinishedRun, read_finished_run
from finetune.runtime import distributed
from finetune.runtime.distributed import run_on_rank_0
from finetune.runtime.optional import no_op
from finetune.runtime.progress import Progress
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER, FINAL_FOLDER
from finetune.strategy.protocol import Strategy
from finetune.strategy.upstream import warm_up_ddp_buckets
from finetune.train.stopping import EARLY_STOPPING


def find_finished(config: RunConfig, strategy: Strategy, data: PreparedData, *, log: RunLog) -> FinishedRun | None:
    """Return the run if its last checkpoint is complete and `final/` is from it; else it is left to `restore`.

    Sizes of files are compared, and digests of the used ones. Needs no model. Raises CheckpointError where
    the config is no longer the one that the run was trained with. Collective.
    """
    finished_run = run_on_rank_0(lambda: read_finished_run(config, num_steps=data.plan.num_steps))
    if finished_run is None:
        return None
    finished, manifest = finished_run
    saved = manifest.run
    frozen = {name: saved.identity[name] for name in _OF_THE_MODEL if name in saved.identity}
    current = fingerprint_with(config, strategy, data.training_data, frozen=frozen)
    if finished.reason == EARLY_STOPPING and not has_comparable_best(saved, current=current):
        return None
    lines = check_changes(finished.checkpoint, saved, current=current, allowed=config.checkpoint.allow_changes)
    if is_other_cache_version(saved, current):
        training, batch_size = data.training_data.training, config.train.global_batch_size
        require_same_samples(finished.checkpoint, finished.progress, pool=training, global_batch_size=batch_size)
    final = Path(config.run.folder) / FINAL_FOLDER
    end = f"nothing to do: {finished.reason} at step {finished.progress.step}, and the model is in {final}"
    for line in (*lines, end):
        log(line)
    return finished


def restore(
    context: RunContext,
    built: BuiltRun,
    checksums: ChecksumPrefetch | None = None,
    *,
    takes_other_rows: bool = False,
    fingerprint: RunFingerprint | None = None,
) -> RestoredRun:
    """Return the run resumed from its checkpoint, or as it was built where there is none. Collective.

    `fingerprint` is the run's, if it is known; it reads frozen weights.
    Raises CheckpointError where the checkpoint was trained on other rows than the job's, unless `takes_other_rows`.
    """
    config, log = context.config, context.log
    training_data, prepared = built.training_data, built.prepared
    if fingerprint is None:
        fingerprint = make_fingerprint(config, context.strategy, training_data, model=prepared.unwrapped_model, log=log)
    access = build_access(prepared.accelerator, prepared.model, prepared.optimizer)
    checksums = checksums or ChecksumPrefetch()
    section = config.checkpoint
    checkpoint = find_checkpoint(context.checkpoints, resume=section.resume, log=log, checksum_of=checksums.checksum)
    if checkpoint is None:
        if section.allow_changes:
            log("checkpoint.allow_changes has no effect: there is no checkpoint to resume from")
        return RestoredRun(context, built, access, fingerprint, Progress())
    batch_size = config.train.global_batch_size
    if checkpoint.step > 0:  # DDP builds its gradient buckets as the run that is resumed had them
        first = training_data.sample_at(checkpoint.step * batch_size)
        batch = training_data.task.collate([first]).to(prepared.accelerator.device)
        warm_up_ddp_buckets(
            prepared.accelerator,
            prepared.model,
            loss=lambda: built.step_task.loss_sums(prepared.model, batch)["loss_sum"],
        )
    state = resume_checkpoint(
        checkpoint,
        access=access,
        run=fingerprint,
        allow_changes=section.allow_changes,
        log=log,
        checksums=checksums,
    )
    progress = Progress.from_state_dict(state)
    if not takes_other_rows:
        require_same_samples(checkpoint.path, progress, pool=training_data.training, global_batch_size=batch_size)
    saved = checkpoint.manifest.run
    if not has_comparable_best(saved, current=fingerprint):
        progress.best_metric, progress.evaluations_since_best = None, 0
    log(f"resumes from {checkpoint.path} after step {progress.step}")
    position = progress.step * batch_size
    was_scaled = saved.identity.get("train.precision") == fingerprint.identity["train.precision"]
    restored = format_restored(position, is_scaled=bool(access.loss_scale.read()), was_scaled=was_scaled)
    for line in (*restored, *format_strategy_change(saved, current=fingerprint)):
        log(line)
    return RestoredRun(context, built, access, fingerprint, progress)


def best_checkpoint(config: RunConfig, *, last_step: int) -> tuple[Path, float] | None:
    """Return the best checkpoint of the run up to this step, and its metric; None where none is kept for that."""
    section = config.checkpoint.keep_best
    if section is None:
        return None
    saved = layout.steps(Path(config.run.folder) / CHECKPOINTS_FOLDER)
    metrics = {step: checkpoint_metrics(path) for step, path in saved.items() if step <= last_step}
    best = best_steps(metrics, section)
    return (saved[best[0]], metrics[best[0]][section.metric]) if best else None


def load_best(restored: RestoredRun) -> Progress:
    """Load the best checkpoint of a run that is over into its model, and return its progress. Collective.

    The present state is kept where nothing better was saved. Raises CheckpointError if it is damaged.
    """
    last, config = restored.progress, restored.context.config
    best = run_on_rank_0(lambda: best_checkpoint(config, last_step=last.step))
    if best is None or layout.step_of(best[0]) == last.step:
        return last
    state = resume_checkpoint(
        verify_checkpoint(best[0]),
        access=restored.access,
        run=restored.fingerprint,
        allow_changes=config.checkpoint.allow_changes,
        log=no_op,
        checksums=ChecksumPrefetch(),
    )
    return Progress.from_state_dict(state)


def describe_exported(config: RunConfig, progress: Progress) -> str | None:
    """Return a line about a better or worse step than that of `final/`; None where none is kept. Not collective."""
    section, best = config.checkpoint.keep_best, best_checkpoint(config, last_step=progress.step)
    if section is None or best is None or (step := layout.step_of(best[0])) == progress.step:
        return None
    final, run = Path(config.run.folder) / FINAL_FOLDER, config.run.folder
    of_best = f"the best checkpoint is of step {step}, with {section.metric} {best[1]:.4g}"
    if config.export.checkpoint == "best":
        return f"{final}: {of_best}, and is exported; the last is of step {progress.step}"
    return f"{final} is of step {progress.step}; {of_best}: finetune export {run} --step {step}"


def require_same_samples(path: Path, progress: Progress, *, pool: DatasetView, global_batch_size: int) -> None:
    """Raise CheckpointError unless the checkpoint was trained on the samples that the order gives to its steps."""
    if not matches_data_order(progress, pool=pool, global_batch_size=global_batch_size):
        raise CheckpointError(
            f"{path} was trained for {progress.step} steps on other samples than this job's order gives, or on samples "
            "with other content, so the run would resume on other data. Restore data, tokenizer, run.seed, "
            "data.shuffle and train.global_batch_size as they were, or write another run.folder to start a new run."
        )


def matches_data_order(progress: Progress, *, pool: DatasetView, global_batch_size: int) -> bool:
    """Return whether the samples of the progress are the samples that the order gives to its steps, by id and content.

    A progress of before contents were known is compared by ids, and counts by contents, too, from now on.
    """
    digest = digest_of_steps(pool, progress.step, global_batch_size=global_batch_size)
    if progress.knows_contents:
        return digest == progress.samples_sha256
    ids = digest_of_step_ids(pool.order, progress.step, global_batch_size=global_batch_size)
    if ids != progress.samples_sha256:
        return False
    progress.samples_sha256, progress.knows_contents = digest, True
    return True


_BEST_METRIC_KEYS = ("train.early_stopping", "train.early_stopping.metric", "train.early_stopping.goal")


def has_comparable_best(saved: RunFingerprint, *, current: RunFingerprint) -> bool:
    """Return whether the best evaluation so far is of the metric and goal that early stopping has now."""
    return all(saved.settings.get(name) == current.settings.get(name) for name in _BEST_METRIC_KEYS)


def format_restored(position: int, *, is_scaled: bool, was_scaled: bool) -> Iterator[str]:
    """Yield a line about the restored and the derived state; of the loss scale, if the loss is scaled now."""
    also = ", step and loss scale" if is_scaled and was_scaled else " and step"
    reset = "; the loss scale is reset: the checkpoint has none" if is_scaled and not was_scaled else ""
    yield f"restored: parameters, optimizer state{also}{reset}"
    yield (
        "derived: random numbers from seed, step and rank; learning rate from the step; "
        f"data position {position:,} from step x global batch"
    )


def format_strategy_change(saved: RunFingerprint, *, current: RunFingerprint) -> Iterator[str]:
    """Yield that losses are equal within rounding under another strategy or number of processes; else nothing."""
    before, now = (
        f"{run.origin.get('strategy')} (processes: {run.origin.get('processes')})" for run in (saved, current)
    )
    if saved.origin and before != now:
        yield (
            f"the checkpoint was written under {before}, and this run is under {now}: losses are equal within rounding "
            "and dropout, not bitwise"
        )


def make_fingerprint(
    config: RunConfig, strategy: Strategy, training_data: TrainingData, *, model: Any, log: RunLog
) -> RunFingerprint:
    """Return what checkpoints remember of this run; rank 0 reads the frozen weights for all ranks. Collective.

    `model` is the model as it was built; its config knows the commit that a hub model came from.
    """
    precomputed = training_data.task.precomputed
    is_reference = precomputed is not None and precomputed.scorer == "reference"
    digest = partial(base_digest, config.model, model=model, is_reference=is_reference, log=log)
    # peft's config; before version 0.3, the head stayed frozen where embeddings tied to it were trained in full
    is_tied = any(getattr(each, "ensure_weight_tying", False) for each in getattr(model, "peft_config", {}).values())
    frozen = {
        "base weights": run_on_rank_0(digest),
        "first adapter": run_on_rank_0(lambda: adapter_digest(config.model.adapter)),
        "teacher": teacher_identity(config, log=log),
        "tied weights": "trained as one" if is_tied and config.model.lora is not None else None,
    }
    known = {name: value for name, value in frozen.items() if value is not None}
    return fingerprint_with(config, strategy, training_data, frozen=known)


_OF_THE_MODEL = ("base weights", "first adapter", "teacher", "tied weights")


def fingerprint_with(
    config: RunConfig, strategy: Strategy, training_data: TrainingData, *, frozen: Mapping[str, str]
) -> RunFingerprint:
    """Return what checkpoints remember of a run with these digests of frozen models and of how weights are tied."""
    digests = {
        DATA: f"{training_data.training.fingerprint}-{CACHE_VERSION}",
        "tokenizer": ", ".join(
            f"{name} {digest}" for name, digest in input_identity(training_data.processing, training_data.task).items()
        ),
        **frozen,
    }
    expected = strategy.expected
    shared = {"rows": expected.sequence_size, "layers": 1 if strategy.name == "tp" else expected.tensor_size}
    return RunFingerprint(
        identity={**keys_that_must_match(config), **digests},
        settings=keys_that_may_differ(config),
        origin={
            "strategy": strategy.name
            + "".join(f" with {name} shared by {size}" for name, size in shared.items() if size > 1),
            "processes": str(distributed.world()),
            **recorded_layout(config),
        },
    )
