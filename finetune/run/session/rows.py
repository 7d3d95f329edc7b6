"""The caller's own rows, encoded as the job's rows are and cut into microbatches, and the loss of a call over them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from finetune.config.run_config import RunConfig
from finetune.config.sections.data import SourceSection
from finetune.data.batch import Batch
from finetune.data.features import Features, Unlabeled
from finetune.data.formats.row_format import choose_format
from finetune.data.rows import RawRow, row_location
from finetune.data.token_cache.integrity import with_checksums
from finetune.errors import DataError, UserError
from finetune.registry.losses import SESSION_LOSSES, TOKEN_LOSSES
from finetune.run.session.results import LossFunction, Scores
from finetune.run.setup.training_data import TrainingData, make_encoding
from finetune.runtime.optional import no_op
from finetune.runtime.seeds import derive_seed
from finetune.task.causal_lm import CausalTask
from finetune.task.lm_loss.head import logits_at_targets
from finetune.task.lm_loss.target_loss import log_probabilities_at_targets
from finetune.task.protocol import Task
from finetune.train.step import StepTask

INPUT_IDS, WEIGHTS = "input_ids", "weights"
VALUE_COLUMNS = (WEIGHTS, "advantages", "old_log_probabilities")
"""Columns with numbers for the loss that a row of text may have, too; a row of tokens may have any others."""


@dataclass(frozen=True)
class EncodedRow:
    """One row as a sample, and its numbers for the loss, one per target, by column."""

    features: Features
    values: Mapping[str, np.ndarray]  # float32 [targets]


class RowEncoder:
    """Encodes rows as the job's own are encoded, or takes them as tokens."""

    def __init__(self, config: RunConfig, training_data: TrainingData) -> None:
        self._data = config.data
        self._task = training_data.task
        self._is_causal = isinstance(training_data.task, CausalTask)
        self._encoding = make_encoding(config.data, training_data.processing, training_data.task, name=config.task.name)
        tokenizer = training_data.tokenizer
        self._vocabulary = 0 if tokenizer is None else len(tokenizer)

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> list[EncodedRow]:
        """Return the rows encoded; raises DataError naming the first that cannot be trained on."""
        precomputed = self._task.precomputed
        if precomputed is not None or self._task.samples.has_partners:
            reason = "pairs samples" if precomputed is None else f"needs the {precomputed.title} of each row"
            raise DataError(
                f"this job's task {reason}, which only its own rows have. Take these from `session.batches()`."
            )
        if not rows:
            raise DataError("there are no rows. Pass at least one.")
        places = [row_location("rows", number) for number in range(1, len(rows) + 1)]
        for row, place in zip(rows, places, strict=True):
            if not isinstance(row, Mapping):
                raise DataError(f"{place}: is a {type(row).__name__}. A row is a dictionary of columns.")
        texts = [number for number, row in enumerate(rows) if INPUT_IDS not in row]
        encoded = dict(zip(texts, self._encode_texts({number: rows[number] for number in texts}), strict=True))
        for number, row in enumerate(rows):
            if number not in encoded:
                encoded[number] = self._from_tokens(row, place=places[number])
        ordered = (encoded[number] for number in range(len(rows)))
        return [replace(row, features=replace(row.features, sample_id=number)) for number, row in enumerate(ordered)]

    def _encode_texts(self, rows: Mapping[int, Mapping[str, Any]]) -> list[EncodedRow]:
        """Return the rows, given by their number from 0, encoded like `data.train`."""
        if not rows:
            return []
        raws = [
            RawRow("rows", number + 1, {name: row[name] for name in row if name not in VALUE_COLUMNS})
            for number, row in rows.items()
        ]
        section = SourceSection() if self._data.train.mix else self._data.train
        row_format = choose_format(section, raws[0], key="data.train", log=no_op)
        outcomes = self._encoding.encode([row_format.read(raw) for raw in raws])
        encoded = []
        for row, raw, outcome in zip(rows.values(), raws, outcomes, strict=True):
            place = raw.location
            if isinstance(outcome, DataError):
                raise DataError(f"{place}: {outcome}") from outcome
            if isinstance(outcome, tuple):
                raise DataError(f"{place}: becomes {len(outcome)} samples. Pass a row for each of its answers.")
            if outcome is None or isinstance(outcome, Unlabeled):
                raise DataError(f"{place}: has no target, so there is nothing to train on. Leave it out.")
            limit = self._encoding.limit
            shorter = (outcome,) if limit.fits(outcome) else limit.shorten(outcome)[0]
            if len(shorter) != 1:
                raise DataError(
                    f"{place}: has {outcome.longest} tokens, more than {limit.limits}. Shorten it, or write "
                    f"{limit.advice.format(longest=outcome.longest)}."
                )
            encoded.append(self._with_values(shorter[0], row, place=place))
        return encoded

    def _with_values(self, features: Features, row: Mapping[str, Any], *, place: str) -> EncodedRow:
        columns = [name for name in VALUE_COLUMNS if name in row]
        if columns and not self._is_causal:
            raise DataError(f"{place}: `{columns[0]}` is for causal language models; this job's task has none.")
        if not columns:
            return EncodedRow(features, {})
        is_target = features.arrays["is_target"].copy()
        is_target[0] = False
        num_targets = int(is_target.sum())
        values = {name: _numbers(row[name], num_targets, f"{place}, `{name}`", "targets") for name in columns}
        return _without_unweighted(features, is_target, values, place=place)

    def _from_tokens(self, row: Mapping[str, Any], *, place: str) -> EncodedRow:
        if not self._is_causal:
            raise DataError(f"{place}: `input_ids` are for causal language models. Pass the columns of the job's rows.")
        ids = _plain(row[INPUT_IDS])
        if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < self._vocabulary for each in ids):
            raise DataError(f"{place}, `input_ids`: must be a list of token numbers from 0 to {self._vocabulary - 1}.")
        if len(ids) > self._data.longest:
            limit = self._data.longest
            raise DataError(f"{place}: has {len(ids)} tokens, more than data.max_length: {limit}. Shorten it.")
        is_target = np.ones(len(ids), bool)
        is_target[:1] = False  # the first token is predicted from nothing
        values = {
            name: _numbers(row[name], len(ids), f"{place}, `{name}`", "tokens")[is_target]
            for name in row
            if name != INPUT_IDS
        }
        features = Features({INPUT_IDS: np.array(ids, np.uint32), "is_target": is_target})
        return _without_unweighted(features, is_target, values, place=place)


def _without_unweighted(
    features: Features, is_target: np.ndarray, values: Mapping[str, np.ndarray], *, place: str
) -> EncodedRow:
    """Return the row whose targets are those with a weight other than 0."""
    counts = values[WEIGHTS] != 0 if WEIGHTS in values else np.ones(int(is_target.sum()), bool)
    if not counts.any():
        raise DataError(f"{place}: has no target: there is no weight other than 0 after the first token. Leave it out.")
    is_target[is_target] = counts
    arrays = {**features.arrays, "is_target": is_target}
    return EncodedRow(replace(features, arrays=arrays), {name: each[counts] for name, each in values.items()})


def _numbers(value: Any, length: int, title: str, unit: str) -> np.ndarray:
    """Return float32 [length] of one number for all, or of a list with a number each."""
    plain = _plain(value)
    numbers = [plain] * length if isinstance(plain, int | float) else plain
    if not isinstance(numbers, list) or not all(isinstance(each, int | float) for each in numbers):
        raise DataError(f"{title}: must be a number, or a list of numbers.")
    if len(numbers) != length:
        raise DataError(f"{title}: has {len(numbers)} numbers for {length} {unit}.")
    array = np.array(numbers, np.float32)
    if not np.isfinite(array).all():
        raise DataError(f"{title}: has a number that is not finite.")
    return array


def _plain(value: Any) -> Any:
    """Return arrays and tensors as lists, anything else as it is."""
    if isinstance(value, tuple):
        return list(value)
    return value.tolist() if isinstance(value, np.ndarray | np.generic | torch.Tensor) else value


def cut_rows(
    rows: Sequence[EncodedRow], task: Task, *, microbatch_size: int, rank: int, world: int, step_seed: int
) -> tuple[Batch, ...]:
    """Return this rank's microbatches of consecutive rows: rank r gets every world-th, as in the job.

    All ranks get equally many: a missing one is the first row without sample ids and targets.
    """
    starts = range(0, len(rows), microbatch_size)
    num_batches = -(-len(starts) // world)

    def collated(number: int) -> Batch:
        chosen = rows[starts[number] : starts[number] + microbatch_size] if number < len(starts) else rows[:1]
        features = [replace(row.features, seed=step_seed) for row in chosen]
        batch = with_checksums(task.collate(features), features)
        names = {name for row in chosen for name in row.values}
        extras = {
            name: torch.from_numpy(np.concatenate([_values_of(row, name) for row in chosen])) for name in sorted(names)
        }
        lengths = batch.lengths or tuple(each.length for each in features)
        batch = replace(batch, extras={**batch.extras, **extras}, seed=step_seed, lengths=lengths)
        return batch if number < len(starts) else replace(batch, num_targets=0, num_tokens=0, sample_ids=())

    return tuple(collated(number) for number in range(rank, num_batches * world, world))


def _values_of(row: EncodedRow, name: str) -> np.ndarray:
    """Return the row's numbers; of a row without the column, 1 for every target if it is the weights."""
    if name in row.values:
        return row.values[name]
    if name != WEIGHTS:
        raise DataError(f"`{name}` must be in all rows, or in none.")
    is_target = row.features.arrays["is_target"]
    return np.ones(int(np.count_nonzero(is_target[1:])), np.float32)


def step_seed(seed: int, step: int) -> int:
    """Return the seed with which the samples of a step are collated."""
    return derive_seed(seed, "samples", step)


@dataclass(frozen=True)
class JobLoss:
    """The job's own loss; a microbatch that only accompanies other ranks' counts for nothing."""

    task: StepTask

    def prepare_step(self, model: nn.Module, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the task's results for them. Collective."""
        return self.task.prepare_step(model, batches)

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the task's sums."""
        sums = self.task.loss_sums(model, batch)
        return sums if batch.sample_ids else {name: value * 0.0 for name, value in sums.items()}

    def step_metrics(self, sums: Mapping[str, Any], *, num_targets: int) -> Mapping[str, float]:
        """Return the task's metrics."""
        return self.task.step_metrics(sums, num_targets=num_targets)


@dataclass(frozen=True)
class TargetLosses:
    """A loss per target, times the target's weight; the log-probabilities are kept for the caller."""

    loss: LossFunction
    scores: Scores = "log_probabilities"
    log_probabilities: list[Tensor] = field(default_factory=list)  # of every microbatch, detached

    def prepare_step(self, model: nn.Module, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the batches as they are."""
        return batches

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the weighted sum; raises UserError where the function does not return one number per target."""
        assert batch.targets is not None, "a causal language model's batch has targets"
        labels = batch.targets.labels
        if self.scores == "logits":
            scores = logits_at_targets(model, batch).float()
            log_probabilities = scores.detach().log_softmax(dim=-1).gather(-1, labels[:, None])[:, 0]
        else:
            scores = log_probabilities_at_targets(model, batch)
            log_probabilities = scores.detach()
        self.log_probabilities.append(log_probabilities)
        losses: Any = self.loss(scores, labels, batch)
        if not isinstance(losses, torch.Tensor) or losses.shape != labels.shape:
            returned = tuple(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise UserError(
                f"loss `{loss_name(self.loss)}` returned {returned}, and {len(labels)} targets need "
                f"({len(labels)},): one loss per target. The mean is taken later, over the targets of the whole step."
            )
        weights = batch.extras.get(WEIGHTS)
        loss_sum = (losses if weights is None else losses * weights).sum()
        return {"loss_sum": loss_sum if batch.sample_ids else loss_sum * 0.0}

    def step_metrics(self, sums: Mapping[str, Any], *, num_targets: int) -> Mapping[str, float]:
        """Return no metrics."""
        return {}


def resolve_loss(loss: str | LossFunction, scores: Scores, *, columns: Collection[str]) -> "TargetLosses":
    """Return the loss of that name, a plugin's too, or the function, which is given these scores.

    Raises RegistryError for an unknown name, DataError where the rows lack a column that the loss reads.
    """
    if not isinstance(loss, str):
        if not callable(loss):
            raise UserError(f"loss: must be a name or a function, and is a {type(loss).__name__}.")
        if scores not in ("log_probabilities", "logits"):
            raise UserError(f"scores: must be `log_probabilities` or `logits`, and is `{scores}`.")
        return TargetLosses(loss, scores)
    if loss in TOKEN_LOSSES:
        return TargetLosses(TOKEN_LOSSES.resolve(loss), TOKEN_LOSSES[loss].scores)
    entry = SESSION_LOSSES[loss]
    if missing := [name for name in entry.columns if name not in columns]:
        raise DataError(f"loss `{loss}` reads `{missing[0]}` of every row, and these have none.")
    return TargetLosses(SESSION_LOSSES.resolve(loss))


def loss_name(loss: object) -> str:
    """Return the name of a loss for messages and comparisons."""
    return loss if isinstance(loss, str) else str(getattr(loss, "__qualname__", type(loss).__qualname__))
