"""What is known of each sample beforehand, from a model that does not learn: worked out once, found again by content.

The model is the prepared one as the run starts from it, so nothing is held twice; a resumed run must come here before
its weights are loaded.
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

from finetune.checkpoint.together import main_does
from finetune.config.run_config import RunConfig
from finetune.data.audit.audit import Prepared, Streamed
from finetune.data.order.mixing import MixedSamples
from finetune.data.order.pool import fingerprint_of
from finetune.data.prepared.cache import cache_folder
from finetune.data.prepared.known import FORMAT_VERSION, KnownArrays, KnownSet, KnownWriter, known_set
from finetune.data.prepared.store import PreparedSet
from finetune.data.verified.damage import DamagedSet, put_aside
from finetune.errors import DataError
from finetune.model.reference import as_reference, reference_identity
from finetune.report.announcer import Announcer
from finetune.run.lessons import Lessons
from finetune.run.machine import Machine
from finetune.run.teacher import teacher_identity, teacher_of
from finetune.runtime import ranks
from finetune.runtime.leftovers import temporary
from finetune.runtime.waypoints import note_life
from finetune.task.protocol import Prior, Task

_SECONDS_BETWEEN_WORDS = 30.0
_SECONDS_TO_APPEAR = 20.0

Known = Sequence[Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Knower:
    """A model that answers and does not learn."""

    model: Callable[[], nn.Module]  # the prepared one, or a teacher, which is loaded when it is first asked
    identity: Mapping[str, Any]  # JSON: what its answers depend on
    answering: Callable[[], AbstractContextManager[None]]  # entered while it answers


def with_priors(config: RunConfig, lessons: Lessons, machine: Machine, *, say: Announcer) -> Lessons:
    """Return the lessons with what the task wants to know of each sample beforehand, training and validation.

    Call it before a checkpoint is loaded. Raises DataError for streams, whose samples are not known beforehand, and
    where the cache cannot be written. Collective.
    """
    prior = lessons.task.prior
    if prior is None:
        return lessons
    work = _Work(config, prior, knower_of(config, lessons.task, machine, say=say), lessons.task, machine, say)
    sets = [work.known(key, source) for key, source in lessons.sources.items()]
    is_mix = isinstance(lessons.training.samples, MixedSamples)
    training = replace(lessons.training, samples=MixedSamples(tuple(sets)) if is_mix else sets[0])
    validation = lessons.validation_set
    if validation is not None:
        validation = work.known("data.validation", validation)
    return replace(lessons, training=training, validation_set=validation)


def with_prior(
    config: RunConfig, task: Task, rows: PreparedSet, *, key: str, machine: Machine, say: Announcer
) -> PreparedSet | KnownSet:
    """Return one set with what the task wants to know of its samples, by the model as it starts. Collective."""
    if task.prior is None:
        return rows
    knower = knower_of(config, task, machine, say=say)
    return _Work(config, task.prior, knower, task, machine, say).known(key, rows)


def knower_of(config: RunConfig, task: Task, machine: Machine, *, say: Announcer) -> Knower:
    """Return who answers for the task's prior, told by a digest. Collective."""
    section, distillation = config.model, config.task.distillation
    if task.prior is not None and task.prior.knower == "teacher" and distillation is not None:
        load = cache(partial(teacher_of, config, task, machine.accelerator, say=say))
        told = {"teacher": teacher_identity(config, say=say), "dtype": distillation.teacher_dtype}
        return Knower(load, told, nullcontext)
    ranks.open_line_behind()  # its time limit allows for reading hundreds of gigabytes
    describe = partial(reference_identity, section, seed=config.run.seed, model=machine.plain_model, say=say)
    identity = main_does(describe, group=ranks.Group.BEHIND)
    return Knower(lambda: machine.model, identity, partial(as_reference, machine.plain_model, section))


@dataclass(frozen=True)
class _Work:
    """Works out, or finds, what is known of the samples of one set after the other."""

    config: RunConfig
    prior: Prior
    knower: Knower
    task: Task
    machine: Machine
    say: Announcer

    def known(self, key: str, source: Prepared | Streamed) -> KnownSet:
        """Return the set of the source with what is known of its samples. Collective."""
        if not isinstance(source, PreparedSet):
            raise DataError(
                f"{key}: the {self.prior.title} of a stream cannot be worked out beforehand. Remove `stream`."
            )
        made_of = {
            "set": source.fingerprint,
            "model": dict(self.knower.identity),
            "precision": self.config.train.precision,
            "prior": {"title": self.prior.title, **self.prior.identity},
        }
        folder = cache_folder(self.config.data) / "known" / fingerprint_of(FORMAT_VERSION, made_of)
        if main_does(lambda: self._is_whole(key, folder)):
            self.say(f"{key}: {self.prior.title} found in {folder}")
        else:
            seconds = self._make(key, source, folder, made_of=made_of)
            self.say(f"{key}: {self.prior.title} worked out in {seconds:.1f} s, kept in {folder}")
        _require_everywhere(folder)
        return known_set(source, folder)

    def _is_whole(self, key: str, folder: Path) -> bool:
        """Tell whether the folder is there and as it was written; one that is damaged is set aside."""
        if not os.path.lexists(folder):
            return False
        damage = _damage(folder)
        if damage is None:
            return True
        aside = put_aside(folder, lambda: _damage(folder) is not None, say=self.say)
        if aside is not None:
            self.say(f"warning: {key}: {damage}. It is set aside as {aside.name} and worked out again.")
        return folder.is_dir()

    def _make(self, key: str, source: PreparedSet, folder: Path, *, made_of: Mapping[str, Any]) -> float:
        """Make the folder, whole or not at all, and return how many seconds it took. Collective."""
        started = time.monotonic()
        writing = _Writing(folder)
        model = self.knower.model()
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad(), self.knower.answering():
                self._ask(key, source, writing=writing)
        finally:
            model.train(was_training)
        main_does(partial(writing.finish, made_of))
        return time.monotonic() - started

    def _ask(self, key: str, source: PreparedSet, *, writing: "_Writing") -> None:
        """Share the samples among the ranks, round by round, and have the main rank write what is known. Collective."""
        size, told_at = self._microbatch_size(), time.monotonic()
        for start in range(0, len(source), size * ranks.world()):
            first = start + ranks.rank() * size
            features = [source.intact(index) for index in range(first, min(first + size, len(source)))]
            batch = self.task.collate(features) if features else self.task.filler(source[0])
            answers = self.prior.work_out(self.knower.model(), batch.to(self.machine.accelerator.device))
            gathered = ranks.gather_objects(list(answers[: len(features)]))
            writing.append([each for of_rank in gathered for each in of_rank])
            note_life()
            if time.monotonic() - told_at > _SECONDS_BETWEEN_WORDS:
                told_at = time.monotonic()
                done = min(start + size * ranks.world(), len(source))
                self.say(f"{key}: {self.prior.title}: {done:,} of {len(source):,} samples")

    def _microbatch_size(self) -> int:
        """Return the samples of a forward pass: as an evaluation has them, at least two."""
        evaluate = self.config.evaluate
        asked = evaluate.microbatch_size if evaluate is not None else None
        return max(2, asked or self.config.train.microbatch_size)


def _damage(folder: Path) -> DamagedSet | None:
    try:
        KnownArrays(folder).verify()
    except DamagedSet as damage:
        return damage
    return None


class _Writing:
    """What the main rank writes; what fails is told when all ranks are there to hear of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._staging: Path | None = None
        self._writer: KnownWriter | None = None
        self._failure: OSError | None = None
        if ranks.is_main():
            self._attempt(self._begin)

    def append(self, known: Known) -> None:
        """Write what is known of the next samples, on the main rank."""
        if self._writer is not None and self._failure is None:
            self._attempt(partial(self._writer.append, known))

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
        self._staging = temporary(self._folder)
        self._staging.mkdir(mode=0o700)
        self._writer = KnownWriter(self._staging)

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


def _require_everywhere(folder: Path) -> None:
    """Raise DataError unless every rank sees the folder, which may take a moment on shared storage. Collective."""
    deadline = time.monotonic() + _SECONDS_TO_APPEAR
    while not (is_there := folder.is_dir()) and time.monotonic() < deadline:
        time.sleep(0.5)
    blind = [rank for rank, sees in enumerate(ranks.gather_objects(is_there)) if not sees]
    if blind:
        raise DataError(
            f"data.cache_folder: {folder} is not there on ranks {', '.join(map(str, blind))}. Set it to a folder that "
            "all machines share."
        )
