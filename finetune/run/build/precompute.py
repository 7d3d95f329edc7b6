"""Values precomputed for each sample by a frozen model: reference log-probabilities, a teacher's top-k.

They are computed once and cached by content. The frozen model is a teacher, or the prepared model as the run starts
from it, so nothing is held twice; a resumed run must precompute before its checkpoint is loaded.
"""

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from finetune.config.run_config import RunConfig
from finetune.data.audit.audit import Prepared, Streamed
from finetune.data.order.dataset_view import fingerprint_of
from finetune.data.order.mixing import MixedSamples
from finetune.data.precomputed import (
    FORMAT_VERSION,
    PrecomputedArrays,
    PrecomputedSet,
    PrecomputedWriter,
    with_precomputed,
)
from finetune.data.token_cache.cache import cache_folder
from finetune.data.token_cache.integrity import DamagedSet, quarantine_set
from finetune.data.token_cache.store import PreparedSet
from finetune.errors import DataError
from finetune.model.frozen_models import reference_identity, reference_mode
from finetune.report.run_log import RunLog
from finetune.run.build.data import TrainingData
from finetune.run.build.prepared_model import PreparedModel
from finetune.run.build.teacher import load_unsharded_teacher, teacher_identity
from finetune.runtime import distributed
from finetune.runtime.distributed import run_on_rank_0
from finetune.runtime.files.atomic import temporary_path
from finetune.runtime.supervision.heartbeat import keep_alive
from finetune.task.protocol import Precomputed, Task

_SECONDS_BETWEEN_LOG_LINES = 30.0
_SHARED_FOLDER_TIMEOUT_SECONDS = 20.0

SampleValues = Sequence[Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Scorer:
    """A model that answers and does not learn."""

    model: Callable[[], nn.Module]  # the prepared one, or a teacher, which is loaded when it is first asked
    identity: Mapping[str, Any]  # JSON: what its answers depend on
    scoring_context: Callable[[], AbstractContextManager[None]]  # entered while it answers


def precompute(config: RunConfig, training_data: TrainingData, prepared: PreparedModel, *, log: RunLog) -> TrainingData:
    """Return the lessons with what the task wants to know of each sample beforehand, training and validation.

    Call it before a checkpoint is loaded. Raises DataError for streams, whose samples are not known beforehand, and
    where the cache cannot be written. Collective.
    """
    prior = training_data.task.precomputed
    if prior is None:
        return training_data
    work = _Precomputation(
        config, prior, make_scorer(config, training_data.task, prepared, log=log), training_data.task, prepared, log
    )
    sets = [work.known(key, source) for key, source in training_data.sources.items()]
    is_mix = isinstance(training_data.training.samples, MixedSamples)
    training = replace(training_data.training, samples=MixedSamples(tuple(sets)) if is_mix else sets[0])
    validation = training_data.validation_set
    if validation is not None:
        validation = work.known("data.validation", validation)
    return replace(training_data, training=training, validation_set=validation)


def precompute_set(
    config: RunConfig, task: Task, rows: PreparedSet, *, key: str, prepared: PreparedModel, log: RunLog
) -> PreparedSet | PrecomputedSet:
    """Return one set with what the task wants to know of its samples, by the model as it starts. Collective."""
    if task.precomputed is None:
        return rows
    knower = make_scorer(config, task, prepared, log=log)
    return _Precomputation(config, task.precomputed, knower, task, prepared, log).known(key, rows)


def make_scorer(config: RunConfig, task: Task, prepared: PreparedModel, *, log: RunLog) -> Scorer:
    """Return who answers for the task's prior, told by a digest. Collective."""
    section, distillation = config.model, config.task.distillation
    if task.precomputed is not None and task.precomputed.scorer == "teacher" and distillation is not None:
        load = cache(partial(load_unsharded_teacher, config, task, prepared.accelerator, log=log))
        told = {"teacher": teacher_identity(config, log=log), "dtype": distillation.teacher_dtype}
        return Scorer(load, told, nullcontext)
    distributed.open_background_group()  # its time limit allows for reading hundreds of gigabytes
    describe = partial(reference_identity, section, seed=config.run.seed, model=prepared.unwrapped_model, log=log)
    identity = run_on_rank_0(describe, group=distributed.Group.BACKGROUND)
    return Scorer(lambda: prepared.model, identity, partial(reference_mode, prepared.unwrapped_model, section))


@dataclass(frozen=True)
class _Precomputation:
    """Works out, or finds, what is known of the samples of one set after the other."""

    config: RunConfig
    precomputed: Precomputed
    scorer: Scorer
    task: Task
    machine: PreparedModel
    say: RunLog

    def known(self, key: str, source: Prepared | Streamed) -> PrecomputedSet:
        """Return the set of the source with what is known of its samples. Collective."""
        if not isinstance(source, PreparedSet):
            raise DataError(
                f"{key}: the {self.precomputed.title} of a stream cannot be worked out beforehand. Remove `stream`."
            )
        made_of = {
            "set": source.fingerprint,
            "model": dict(self.scorer.identity),
            "precision": self.config.train.precision,
            "prior": {"title": self.precomputed.title, **self.precomputed.identity},
        }
        folder = cache_folder(self.config.data) / "known" / fingerprint_of(FORMAT_VERSION, made_of)
        if run_on_rank_0(lambda: self._is_whole(key, folder)):
            self.say(f"{key}: {self.precomputed.title} found in {folder}")
        else:
            seconds = self._compute(key, source, folder, made_of=made_of)
            self.say(f"{key}: {self.precomputed.title} worked out in {seconds:.1f} s, kept in {folder}")
        _require_on_all_ranks(folder)
        return with_precomputed(source, folder)

    def _is_whole(self, key: str, folder: Path) -> bool:
        """Tell whether the folder is there and as it was written; one that is damaged is set aside."""
        if not os.path.lexists(folder):
            return False
        damage = _damage(folder)
        if damage is None:
            return True
        aside = quarantine_set(folder, lambda: _damage(folder) is not None, log=self.say)
        if aside is not None:
            self.say(f"warning: {key}: {damage}. It is set aside as {aside.name} and worked out again.")
        return folder.is_dir()

    def _compute(self, key: str, source: PreparedSet, folder: Path, *, made_of: Mapping[str, Any]) -> float:
        """Make the folder, whole or not at all, and return how many seconds it took. Collective."""
        started = time.monotonic()
        writing = _StagedWriter(folder)
        model = self.scorer.model()
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad(), self.scorer.scoring_context():
                self._ask(key, source, writing=writing)
        finally:
            model.train(was_training)
        run_on_rank_0(partial(writing.finish, made_of))
        return time.monotonic() - started

    def _ask(self, key: str, source: PreparedSet, *, writing: "_StagedWriter") -> None:
        """Share the samples among the ranks, round by round, and have the main rank write what is known. Collective."""
        size, told_at = self._microbatch_size(), time.monotonic()
        for start in range(0, len(source), size * distributed.world()):
            first = start + distributed.rank() * size
            features = [source.intact(index) for index in range(first, min(first + size, len(source)))]
            batch = self.task.collate(features) if features else self.task.dummy_batch(source[0])
            answers = self.precomputed.compute(self.scorer.model(), batch.to(self.machine.accelerator.device))
            gathered = distributed.gather_objects(list(answers[: len(features)]))
            writing.append([each for of_rank in gathered for each in of_rank])
            keep_alive()
            if time.monotonic() - told_at > _SECONDS_BETWEEN_LOG_LINES:
                told_at = time.monotonic()
                done = min(start + size * distributed.world(), len(source))
                self.say(f"{key}: {self.precomputed.title}: {done:,} of {len(source):,} samples")

    def _microbatch_size(self) -> int:
        """Return the samples of a forward pass: as an evaluation has them, at least two."""
        evaluate = self.config.evaluate
        asked = evaluate.microbatch_size if evaluate is not None else None
        return max(2, asked or self.config.train.microbatch_size)


def _damage(folder: Path) -> DamagedSet | None:
    try:
        PrecomputedArrays(folder).verify()
    except DamagedSet as damage:
        return damage
    return None


class _StagedWriter:
    """What the main rank writes; what fails is told when all ranks are there to hear of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._staging: Path | None = None
        self._writer: PrecomputedWriter | None = None
        self._failure: OSError | None = None
        if distributed.is_main():
            self._attempt(self._begin)

    def append(self, arrays: SampleValues) -> None:
        """Write what is known of the next samples, on the main rank."""
        if self._writer is not None and self._failure is None:
            self._attempt(partial(self._writer.append, arrays))

    def finish(self, made_of: Mapping[str, Any]) -> None:
        """Let the folder appear; another job may have made the same meanwhile. Raises DataError. On the main rank."""
        if self._failure is None:
            self._attempt(partial(self._complete, made_of))
        if self._writer is not None:
            self._writer.close()
        if self._staging is not None:
            shutil.rmtree(self._staging, ignore_errors=True)
        if self._failure is not None:
            raise DataError(
                f"data.cache_folder: {self._folder.parent} cannot be written: {self._failure}. Make room or set "
                "another one."
            )

    def _begin(self) -> None:
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        self._staging = temporary_path(self._folder)
        self._staging.mkdir(mode=0o700)
        self._writer = PrecomputedWriter(self._staging)

    def _complete(self, made_of: Mapping[str, Any]) -> None:
        assert self._writer is not None and self._staging is not None
        self._writer.finish(made_of)
        self._staging.chmod(0o755)
        if not self._folder.is_dir():
            self._staging.rename(self._folder)

    def _attempt(self, act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:
            self._failure = error


def _require_on_all_ranks(folder: Path) -> None:
    """Raise DataError unless every rank sees the folder, which may take a moment on shared storage. Collective."""
    deadline = time.monotonic() + _SHARED_FOLDER_TIMEOUT_SECONDS
    while not (is_there := folder.is_dir()) and time.monotonic() < deadline:
        time.sleep(0.5)
    blind = [rank for rank, sees in enumerate(distributed.gather_objects(is_there)) if not sees]
    if blind:
        raise DataError(
            f"data.cache_folder: {folder} is not there on ranks {', '.join(map(str, blind))}. Set it to a folder that "
            "all machines share."
        )
