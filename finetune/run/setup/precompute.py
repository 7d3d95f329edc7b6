"""Frozen models: a live teacher, and values precomputed for each sample (reference log-probabilities, top-k).

They are computed once and cached by content. The frozen model is a teacher, or the prepared model as the run starts
from it, so nothing is held twice; a resumed run must precompute before its checkpoint is loaded.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from finetune.config.run_config import RunConfig
from finetune.config.sections.model import ModelSection
from finetune.data.audit import Streamed
from finetune.data.order.mixing import MixedSamples
from finetune.data.order.order import fingerprint_of
from finetune.data.token_cache.cache import cache_folder
from finetune.data.token_cache.integrity import DamagedSet, quarantine_set
from finetune.data.token_cache.store import (
    CACHE_VERSION,
    PrecomputedArrays,
    PrecomputedWriter,
    TokenCache,
)
from finetune.errors import DataError
from finetune.model.frozen_models import (
    TEACHER_KEY,
    check_teacher_tokenizer,
    load_teacher,
    reference_identity,
    reference_mode,
    weights_digest,
)
from finetune.model.size import measure_model
from finetune.report.reporter import RunLog
from finetune.run.setup.accelerator import PreparedModel
from finetune.run.setup.training_data import TrainingData
from finetune.runtime import distributed
from finetune.runtime.distributed import run_on_rank_0
from finetune.runtime.files.atomic import temporary_path
from finetune.runtime.parallel import tensor_group
from finetune.runtime.supervision.heartbeat import keep_alive
from finetune.strategy.upstream import unsharded
from finetune.task.distillation import DistillationTask
from finetune.task.protocol import Precomputed, Task

_SECONDS_BETWEEN_LOG_LINES = 30.0
_SHARED_FOLDER_TIMEOUT_SECONDS = 20.0
_MAX_POSITIONS = 1 << 14
"""Of a forward pass whose size is not written: about 1 GB of a 7B model's widest layer."""
_MAX_SAMPLES = 64


@dataclass(frozen=True)
class Scorer:
    """A frozen model that scores samples."""

    model: Callable[[], nn.Module]  # the prepared one, or a teacher, which is loaded on its first use
    identity: Mapping[str, Any]  # JSON: all that its scores depend on
    scoring_context: Callable[[], AbstractContextManager[None]]  # entered while it scores


def add_frozen_models(
    config: RunConfig, training_data: TrainingData, prepared: PreparedModel, *, log: RunLog
) -> TrainingData:
    """Return the data with everything that its task precomputes, and its task with a live teacher if it has one.

    Raises ModelError for the teacher, DataError as `precompute` does. Collective.
    """
    data = precompute(config, training_data, prepared, log=log)
    task = attach_teacher(config.model, data.task, accelerator=prepared.accelerator, log=log)
    return replace(data, task=task)


def precompute(config: RunConfig, training_data: TrainingData, prepared: PreparedModel, *, log: RunLog) -> TrainingData:
    """Return the data with the values that the task precomputes for each training and validation sample.

    The prepared model must have the weights that the run started from. Raises DataError for streams, whose samples are
    not known yet, and where the cache cannot be written. Collective.
    """
    task = training_data.task
    if task.precomputed is None:
        return training_data
    scorer = make_scorer(config, task, prepared, log=log)
    work = _Precomputation(config, log, task.precomputed, scorer, task, prepared)
    sets = [work.load_or_compute(key, source) for key, source in training_data.sources.items()]
    is_mix = isinstance(training_data.training.samples, MixedSamples)
    training = replace(training_data.training, samples=MixedSamples(tuple(sets)) if is_mix else sets[0])
    validation = training_data.validation_set
    if validation is not None:
        validation = work.load_or_compute("data.validation", validation)
    return replace(training_data, training=training, validation_set=validation)


def precompute_set(
    config: RunConfig, task: Task, rows: TokenCache, *, key: str, prepared: PreparedModel, log: RunLog
) -> TokenCache:
    """Return one set with the values that the task precomputes with the initial model. Collective."""
    if task.precomputed is None:
        return rows
    scorer = make_scorer(config, task, prepared, log=log)
    return _Precomputation(config, log, task.precomputed, scorer, task, prepared).load_or_compute(key, rows)


def make_scorer(config: RunConfig, task: Task, prepared: PreparedModel, *, log: RunLog) -> Scorer:
    """Return the model that scores the task's samples, identified by a digest. Collective."""
    section, distillation = config.model, config.task.distillation
    if task.precomputed is not None and task.precomputed.scorer == "teacher" and distillation is not None:
        load = cache(partial(load_unsharded_teacher, section, task, accelerator=prepared.accelerator, log=log))
        teacher = {"teacher": teacher_identity(config, log=log), "dtype": distillation.teacher_dtype}
        return Scorer(load, teacher, nullcontext)
    describe = partial(reference_identity, section, seed=config.run.seed, model=prepared.unwrapped_model, log=log)
    identity = run_on_rank_0(describe)
    return Scorer(lambda: prepared.model, identity, partial(reference_mode, prepared.unwrapped_model, section))


def attach_teacher(model: ModelSection, task: Task, *, accelerator: Accelerator, log: RunLog) -> Task:
    """Return the task with its live teacher; as it is if it has none. Raises ModelError."""
    if not isinstance(task, DistillationTask) or task.section.cache:
        return task
    return task.attach_teacher(load_unsharded_teacher(model, task, accelerator=accelerator, log=log))


def load_unsharded_teacher(model: ModelSection, task: Task, *, accelerator: Accelerator, log: RunLog) -> nn.Module:
    """Return the teacher, unsharded on this rank's device: never wrapped, trained or saved; raises ModelError."""
    assert isinstance(task, DistillationTask)
    section = task.section
    check_teacher_tokenizer(section, model=model, tokenizer=task.tokenizer)
    with unsharded(accelerator):
        size = len(task.tokenizer)
        teacher: nn.Module = load_teacher(section, model=model, vocabulary_size=size, device=accelerator.device)
    log(f"teacher {section.teacher}, unsharded in every process: {measure_model(teacher).lines[1]}")
    return teacher


def teacher_identity(config: RunConfig, *, log: RunLog) -> str | None:
    """Return the digest of the teacher's weights; None without a teacher. Collective."""
    section = config.task.distillation
    if section is None:
        return None
    compute = partial(weights_digest, section.teacher, section=config.model, key=TEACHER_KEY, log=log)
    digest: str = run_on_rank_0(compute)
    return digest


@dataclass(frozen=True)
class _Precomputation:
    """Computes the values of one set after the other, or finds them in the cache."""

    config: RunConfig
    log: RunLog
    precomputed: Precomputed
    scorer: Scorer
    task: Task
    prepared: PreparedModel

    def load_or_compute(self, key: str, source: TokenCache | Streamed) -> TokenCache:
        """Return the set of the source with the precomputed values of its samples. Collective."""
        config, log = self.config, self.log
        if not isinstance(source, TokenCache):
            raise DataError(f"{key}: {self.precomputed.title} cannot be precomputed for a stream. Remove `stream`.")
        made_of = {
            "set": source.fingerprint,
            "model": dict(self.scorer.identity),
            "precision": config.train.precision,
            "prior": {"title": self.precomputed.title, **self.precomputed.identity},
        }
        folder = cache_folder(config.data) / "known" / fingerprint_of(CACHE_VERSION, made_of)
        if run_on_rank_0(lambda: self._is_cached(key, folder)):
            log(f"{key}: {self.precomputed.title} found in {folder}")
        else:
            seconds = self._compute(key, source, folder, made_of=made_of)
            log(f"{key}: {self.precomputed.title} computed in {seconds:.1f} s, cached in {folder}")
        # On shared storage it may take a moment until every rank sees the folder.
        deadline = time.monotonic() + _SHARED_FOLDER_TIMEOUT_SECONDS
        while not (is_there := folder.is_dir()) and time.monotonic() < deadline:
            time.sleep(0.5)
        missing = [rank for rank, sees in enumerate(distributed.gather_objects(is_there)) if not sees]
        if missing:
            raise DataError(
                f"data.cache_folder: {folder} does not exist on ranks {', '.join(map(str, missing))}. Set it to a "
                "folder that all machines share."
            )
        return TokenCache(source.folder, PrecomputedArrays(folder), shards=source.shards)

    def _is_cached(self, key: str, folder: Path) -> bool:
        """Return whether the folder exists and is as it was written; a damaged one is moved aside."""
        if not os.path.lexists(folder):
            return False
        damage = _damage(folder)
        if damage is None:
            return True
        aside = quarantine_set(folder, lambda: _damage(folder) is not None, log=self.log)
        if aside is not None:
            self.log(f"warning: {key}: {damage}. It was moved aside to {aside.name} and is computed again.")
        return folder.is_dir()

    def _compute(self, key: str, source: TokenCache, folder: Path, *, made_of: Mapping[str, Any]) -> float:
        """Write the folder, completely or not at all, and return how many seconds it took. Collective.

        Raises DataError on rank 0, with which the others end, where it cannot be written.
        """
        started = time.monotonic()
        model = self.scorer.model()
        was_training = model.training
        model.eval()
        try:
            with (
                _write_on_rank_0(folder, made_of) as writer,
                torch.no_grad(),
                self.scorer.scoring_context(),
            ):
                self._score_samples(key, source, writer=writer)
        finally:
            model.train(was_training)
        return time.monotonic() - started

    def _score_samples(self, key: str, source: TokenCache, *, writer: PrecomputedWriter | None) -> None:
        """Share the samples among the ranks, round by round, and have rank 0 write their values. Collective."""
        size, logged_at, group = self._microbatch_size(source), time.monotonic(), tensor_group()
        for start in range(0, len(source), size * group.num_groups):
            first = start + group.number * size
            features = [source.intact(index) for index in range(first, min(first + size, len(source)))]
            batch = self.task.collate(features) if features else self.task.dummy_batch(source[0])
            values = self.precomputed.compute(self.scorer.model(), batch.to(self.prepared.accelerator.device))
            gathered = distributed.gather_objects(list(values[: len(features)]))[:: group.size]
            if writer is not None:
                writer.append([values_of_sample for of_rank in gathered for values_of_sample in of_rank])
            keep_alive()
            if time.monotonic() - logged_at > _SECONDS_BETWEEN_LOG_LINES:
                logged_at = time.monotonic()
                done = min(start + size * group.num_groups, len(source))
                self.log(f"{key}: {self.precomputed.title}: {done:,} of {len(source):,} samples")

    def _microbatch_size(self, source: TokenCache) -> int:
        """Return the samples of a forward pass: as many as in an evaluation, at least two."""
        evaluate, train = self.config.evaluate, self.config.train
        written = evaluate.microbatch_size if evaluate is not None else None
        if written is None and train.microbatch_size == "auto":
            return samples_of_positions(int(source.lengths.max()))
        return max(2, written or train.known_microbatch_size)


def samples_of_positions(longest: int) -> int:
    """Return the samples of a forward pass where nothing is known of memory but that it keeps no activations."""
    return min(_MAX_SAMPLES, max(2, _MAX_POSITIONS // max(1, longest)))


def _damage(folder: Path) -> DamagedSet | None:
    try:
        PrecomputedArrays(folder).verify()
    except DamagedSet as damage:
        return damage
    return None


@contextmanager
def _write_on_rank_0(folder: Path, made_of: Mapping[str, Any]) -> Iterator[PrecomputedWriter | None]:
    """Yield the writer of a hidden folder, on rank 0, which is moved into place at the end. Collective."""
    staging, writer = temporary_path(folder), None
    try:
        if distributed.is_main():
            folder.parent.mkdir(parents=True, exist_ok=True)
            staging.mkdir(mode=0o700)
            writer = PrecomputedWriter(staging)
        yield writer
        with distributed.rank_0_works_alone():
            if writer is not None:
                writer.finish(made_of)
                staging.chmod(0o755)
                if not folder.is_dir():
                    staging.rename(folder)
    except OSError as error:
        raise DataError(
            f"data.cache_folder: {folder.parent} cannot be written: {error}. Free some space, or set another folder."
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
