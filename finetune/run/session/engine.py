"""The steps of an opened run: gradients, updates, checkpoints and the exported model, each when the caller asks."""

import hashlib
import json
import math
import pickle
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finetune.checkpoint.format import layout
from finetune.data.batch import Batch
from finetune.data.token_cache.integrity import extend_digest, sample_checksum, samples_checksum
from finetune.errors import CheckpointError, FinetuneError, LostContact, UserError
from finetune.run.final_export import export_final
from finetune.run.session.open import SESSION_CLOSED, OpenedRun
from finetune.run.session.results import ForwardBackward, JobBatch, LossFunction, OptimStep, Rows, Scores
from finetune.run.session.rows import (
    WEIGHTS,
    EncodedRow,
    JobLoss,
    RowEncoder,
    TargetLosses,
    cut_rows,
    loss_name,
    resolve_loss,
    step_seed,
)
from finetune.run.state.resume import restore
from finetune.runtime import distributed, seeds
from finetune.runtime.supervision.exit import is_broken_collective
from finetune.strategy.upstream import complete_gradients, deepspeed_engine
from finetune.task.causal_lm import CausalTask
from finetune.task.lm_loss.target_loss import log_probabilities_at_targets
from finetune.task.lm_loss.token_loss import TokenLoss
from finetune.train.loop import count_step, report_steps
from finetune.train.meters import Meters, StepRecord
from finetune.train.optim.optimizers import begin_step
from finetune.train.step import TrainingComponents, forward_backward, start_step_counts, update_weights

_MARK_RANGE = 2**64


@dataclass
class _OpenStep:
    """The gradients accumulated since the last update."""

    divisor: int  # the targets by which they were divided: of the first call
    started: float
    num_calls: int = 0
    num_targets: int = 0
    num_tokens: int = 0
    mark: int = 0  # of the samples
    losses: list[Tensor] = field(default_factory=list)
    sample_ids: list[tuple[int, ...]] = field(default_factory=list)


class StepEngine:
    """Takes the steps of an opened run. Every method is collective."""

    def __init__(self, opened: OpenedRun) -> None:
        self._opened = opened
        self._config = opened.restored.context.config
        self._built = opened.restored.built
        self._encoder = RowEncoder(self._config, self._built.training_data)
        self._groups: Iterator[tuple[Batch, ...]] = iter(())
        self._job_group: tuple[int, tuple[Batch, ...]] = (-1, ())  # the last that was handed out, and its step
        self._open_step: _OpenStep | None = None
        self.progress, self.components = opened.restored.progress, opened.components
        self.tokenizer, self.data = self._built.training_data.tokenizer, self._config.data
        self.rank = distributed.rank()
        self.is_changing = False  # within, or after an error within, what changes gradients or weights

    def next_batch(self) -> JobBatch | None:
        """Return the job's own rows of the next step, or None after the last."""
        number = self.progress.step + 1
        if number > self._built.plan.num_steps:
            return None
        if self._job_group[0] != number:
            if self._job_group[0] != number - 1:
                self._groups = self.components.groups(first_step=number - 1)
            self._job_group = (number, next(self._groups))
        return JobBatch(number)

    def forward_backward(
        self,
        rows: JobBatch | Rows,
        *,
        loss: str | LossFunction | None = None,
        scores: Scores = "log_probabilities",
    ) -> ForwardBackward:
        """Accumulate the gradient of the rows' loss. Raises UserError before anything has changed."""
        group = self._group(rows)
        task: Any = JobLoss(self._built.step_task)
        if loss is not None or WEIGHTS in group.columns:
            task = self._resolve(loss, scores, group.columns)
        if group.num_targets == 0:
            raise UserError("the rows have no target on any process, so there is nothing to train on.")
        opened = self._open_step or _OpenStep(group.num_targets, time.perf_counter())
        components = replace(
            self.components, task=task, row_location=group.row_location or self.components.row_location
        )
        with self._changing(), self._step_randomness(opened.num_calls):
            losses, sums = forward_backward(
                components,
                group.batches,
                num_targets=opened.divisor,
                step=self.progress.step,
                completes_step=deepspeed_engine(components.accelerator) is None,
            )
        self._open_step = opened
        opened.num_calls += 1
        opened.num_targets += group.num_targets
        opened.num_tokens += group.num_tokens
        opened.mark = (opened.mark + group.mark) % _MARK_RANGE
        opened.losses.append(losses)
        opened.sample_ids += [batch.sample_ids for batch in group.batches]
        meters = Meters(task.step_metrics)
        meters.add(replace(self._record(opened), losses=losses, num_targets=group.num_targets, sums=sums))
        ((_, event),) = meters.read()
        rows_of_target = task.log_probabilities if isinstance(task, TargetLosses) else None
        return ForwardBackward(
            loss=event.loss,
            loss_sum=event.loss * group.num_targets,
            num_targets=group.num_targets,
            num_tokens=group.num_tokens,
            metrics=event.metrics,
            log_probabilities=() if rows_of_target is None else _by_row(group.batches, rows_of_target),
        )

    def optim_step(self, *, learning_rate: float | None = None) -> OptimStep:
        """Update the weights with the accumulated gradient, unless it is not finite, and drop it."""
        opened, components, progress = self._open_step, self.components, self.progress
        if opened is None:
            raise UserError("optim_step: there is no gradient. Call `forward_backward` first.")
        rate, schedule = learning_rate, self._built.plan.schedule
        if rate is None:
            if progress.step >= schedule.num_steps and schedule.name != "constant":
                raise UserError(
                    f"optim_step: the schedule ends after {schedule.num_steps} steps. Pass `learning_rate`, or write "
                    "more `train.steps`."
                )
            rate = schedule.learning_rate(progress.step)
        if not isinstance(rate, int | float) or not 0 <= rate < math.inf:
            raise UserError(f"optim_step: learning_rate must be a number of at least 0, and is {rate!r}.")
        with self._changing():
            begin_step(components.optimizer, step=progress.step, learning_rate=float(rate))
            complete_gradients(components.accelerator, components.model, divisor=opened.num_targets / opened.divisor)
            norm, is_taken = update_weights(components, progress)
            self._open_step = None
            record = replace(self._record(opened), gradient_norm=norm, is_taken=is_taken, learning_rate=rate)
            count_step(components, progress, record)
            meters = Meters()
            meters.add(record)
            ((_, event),) = meters.read()
            report_steps(components, progress)
        was_skipped = not math.isfinite(event.gradient_norm)
        return OptimStep(progress.step, event.loss, opened.num_targets, event.gradient_norm, rate, was_skipped)

    def log_probabilities(self, rows: Rows) -> tuple[tuple[float, ...], ...]:
        """Return the log-probability of each target of every row, without dropout and without a gradient."""
        group = self._group(rows)
        self._require_causal("log_probabilities")
        with evaluating(self.components):
            return _by_row(
                group.batches, [log_probabilities_at_targets(self.components.model, batch) for batch in group.batches]
            )

    def evaluate(self) -> dict[str, float]:
        """Return the metrics on the validation rows, as `evaluate:` of the job says."""
        if self._config.evaluate is None:
            raise UserError("evaluate: the job has no section `evaluate`. Write `evaluate: {}` and `data.validation`.")
        progress = self.progress
        with seeds.keep_random_state():
            progress.last_metrics, progress.metrics_step = self.components.evaluate(progress.step), progress.step
        return progress.last_metrics

    def save(self) -> Path:
        """Save a checkpoint of the present step, and return its folder when it is complete."""
        self._require_no_gradient("save")
        self.components.save(self.progress)
        self.components.save.wait_for_writes()
        return layout.step_folder(self._opened.restored.context.checkpoints, self.progress.step)

    def load(self, checkpoint: str | Path | None = None) -> int:
        """Load the newest checkpoint of the run, or that in the folder, and return its step."""
        self._require_no_gradient("load")
        context = self._opened.restored.context
        resume = "auto" if checkpoint is None else str(Path(checkpoint).absolute())
        section = context.config.checkpoint.model_copy(update={"resume": resume})
        config = context.config.model_copy(update={"checkpoint": section})
        if (
            checkpoint is None
            and distributed.run_on_rank_0(partial(layout.newest_checkpoint, context.checkpoints)) is None
        ):
            raise CheckpointError(f"load: there is no checkpoint in {context.checkpoints}. Call `save` first.")
        changed = replace(context, loaded=replace(context.loaded, config=config))
        fingerprint = self._opened.restored.fingerprint
        with self._changing():
            restored = restore(changed, self._built, takes_other_rows=True, fingerprint=fingerprint)
            vars(self.progress).update(vars(restored.progress))
        self._job_group = (-1, ())
        return restored.progress.step

    def export(self) -> Path:
        """Write the model to `final/` of the run folder, verified as the job says, and return the folder."""
        self._require_no_gradient("export")
        context, reporter = self._opened.restored.context, self._opened.reporter
        export_final(context.loaded, self._built, reporter, progress=self.progress, reason=SESSION_CLOSED)
        return context.final

    def _group(self, rows: JobBatch | Rows) -> "_Group":
        if isinstance(rows, JobBatch):
            step, batches = self._job_group
            if rows.step != step or step != self.progress.step + 1 or self._open_step is not None:
                raise UserError(
                    f"the batch is of step {rows.step}, and the next step is {self.progress.step + 1}"
                    f"{'' if self._open_step is None else ', which has rows already'}. A batch of the job is a whole "
                    "step: call `optim_step` after each."
                )
            counts = start_step_counts(self.components, batches, step=self.progress.step)()
            return _Group(batches, counts.num_targets, counts.num_tokens, counts.samples)
        encoded: list[EncodedRow] = self._encoder.encode(rows)
        batches = cut_rows(
            encoded,
            self._built.training_data.task,
            microbatch_size=self._built.plan.microbatch_size,
            rank=distributed.rank(),
            world=distributed.world(),
            step_seed=step_seed(self._config.run.seed, self.progress.step),
        )
        num_targets, num_tokens = distributed.sum_counts(
            [sum(batch.num_targets for batch in batches), sum(batch.num_tokens for batch in batches)]
        )
        device = self.components.accelerator.device
        on_device = tuple(batch.to(device) for batch in batches)
        columns = frozenset().union(*(row.values for row in encoded))
        return _Group(
            on_device,
            num_targets,
            num_tokens,
            samples_checksum(range(len(encoded)), [sample_checksum(row.features.arrays) for row in encoded]),
            columns,
            row_location=lambda sample_id: f"row {sample_id + 1} of the call",
        )

    def _resolve(self, loss: str | LossFunction | None, scores: Scores, columns: frozenset[str]) -> TargetLosses:
        self._require_causal("loss")
        if self._config.train.router_aux_loss is not None:
            raise UserError("loss: train.router_aux_loss is added to the job's own loss only. Remove one of them.")
        task = self._config.task
        if loss is None and not TokenLoss(task.label_smoothing, task.z_loss).is_plain:
            raise UserError("weights: task.label_smoothing and task.z_loss take none. Pass a `loss`, or remove them.")
        return resolve_loss(loss or task.loss or "cross_entropy", scores, columns=columns)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        self.is_changing = True
        yield
        self.is_changing = False

    def _require_causal(self, what: str) -> None:
        if not isinstance(self._built.training_data.task, CausalTask):
            raise UserError(
                f"{what}: is for causal language models, and this job's task is `{self._config.task.name}`."
            )

    def _require_no_gradient(self, what: str) -> None:
        if self._open_step is not None:
            raise UserError(f"{what}: there is a gradient that was not used. Call `optim_step` first.")

    @contextmanager
    def _step_randomness(self, num_calls: int) -> Iterator[None]:
        """Seed as the loop seeds the step, further calls by their number; afterwards the caller's numbers go on."""
        python, numpy = random.getstate(), np.random.get_state()
        call = (f"call {num_calls}",) if num_calls else ()
        try:
            with seeds.keep_random_state():
                seeds.seed_everything(self.components.seed, "step", self.progress.step, distributed.rank(), *call)
                yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)

    def _record(self, opened: _OpenStep) -> StepRecord:
        progress = self.progress
        return StepRecord(
            number=progress.step + 1,
            losses=torch.cat(opened.losses),
            gradient_norm=torch.zeros((), device=self.components.accelerator.device),
            is_taken=True,
            sample_ids=tuple(opened.sample_ids),
            learning_rate=0.0,
            num_targets=opened.num_targets,
            num_tokens=opened.num_tokens,
            samples_sha256=extend_digest(progress.samples_sha256, opened.mark),
            epoch=self.components.plan.epoch(progress.step),
            seconds=time.perf_counter() - opened.started,
            data_seconds=0.0,
        )


@dataclass(frozen=True)
class _Group:
    """The microbatches of this rank, and the counts of all ranks."""

    batches: tuple[Batch, ...]
    num_targets: int
    num_tokens: int
    mark: int
    columns: frozenset[str] = frozenset()  # of numbers for the loss
    row_location: Callable[[int], str] | None = None  # of a sample id, for messages; None: as of the job's own


@contextmanager
def evaluating(components: TrainingComponents) -> Iterator[None]:
    """Have the model without dropout and gradients meanwhile, and the caller's random numbers as they were."""
    was_training = components.model.training
    components.model.eval()
    try:
        with torch.no_grad(), seeds.keep_random_state():
            yield
    finally:
        components.model.train(was_training)


def _by_row(batches: Sequence[Batch], per_target: Sequence[Tensor]) -> tuple[tuple[float, ...], ...]:
    """Return the numbers of the targets of every row of all ranks, in the order of the rows. Collective."""
    own: dict[int, tuple[float, ...]] = {}
    for batch, numbers in zip(batches, per_target, strict=True):
        if not batch.sample_ids:
            continue
        assert batch.targets is not None, "a causal language model's batch has targets"
        parts = torch.split(numbers.detach().float().cpu(), list(batch.targets.per_row))
        own |= {sample_id: tuple(part.tolist()) for sample_id, part in zip(batch.sample_ids, parts, strict=True)}
    everyone = {sample_id: row for rank_rows in distributed.gather_objects(own) for sample_id, row in rank_rows.items()}
    return tuple(everyone[sample_id] for sample_id in sorted(everyone))


FOLLOW = "follow"


def agree(method: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
    """Return rank 0's method, which is that of all ranks, or whether the others follow it. Collective.

    Raises UserError naming the first difference on all ranks, LostContact where a rank is gone.
    """
    try:
        calls = distributed.gather_objects((method, {name: _digest(value) for name, value in arguments.items()}))
    except RuntimeError as error:
        if not is_broken_collective(error):
            raise
        raise LostContact(
            f"another process of the session is gone while this one calls `{method}`. Its own message says why."
        ) from error
    (first, digests), others = calls[0], calls[1:]
    if first == FOLLOW:
        raise UserError("follow: rank 0 leads, so it must not follow. Call `follow` on the other ranks only.")
    if others and all(other == FOLLOW for other, _ in others):
        return first, True
    for rank, (other, other_digests) in enumerate(others, 1):
        difference = None
        if other != first:
            difference = f"rank 0 calls `{first}`, and rank {rank} calls `{other}`"
        elif names := [name for name, digest in digests.items() if digest != other_digests[name]]:
            difference = f"`{names[0]}` of `{first}` is not the same on rank 0 and rank {rank}"
        if difference is not None:
            raise UserError(f"ranks call different things: {difference}. Every rank must make the same calls.")
    return first, False


def send_call(method: str, arguments: Mapping[str, Any]) -> None:
    """Send rank 0's call to the ranks that follow. Raises UserError on all if it cannot be sent. Collective."""
    try:
        content: bytes | str = pickle.dumps((method, dict(arguments)))
    except Exception as error:  # any exception that the argument's own code raises
        content = f"{method}: an argument cannot be sent to ranks that follow ({error}). Functions must be importable."
    distributed.broadcast_object(content)
    if isinstance(content, str):
        raise UserError(content)


def receive_call() -> tuple[str, dict[str, Any]]:
    """Return rank 0's method and arguments; raises UserError if they could not be sent. Collective."""
    content: bytes | str = distributed.broadcast_object(b"")
    if isinstance(content, str):
        raise UserError(content)
    try:
        method, arguments = pickle.loads(content)  # from rank 0 of this run
    except Exception as error:
        raise FinetuneError(f"a call of rank 0 cannot be read here: {error}.") from error
    return str(method), dict(arguments)


def _digest(value: Any) -> str:
    if callable(value):
        return loss_name(value)

    def plain(item: Any) -> Any:
        return item.tolist() if isinstance(item, np.ndarray | np.generic | torch.Tensor) else repr(item)

    value = list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else value
    text = json.dumps(value, default=plain, sort_keys=True)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
