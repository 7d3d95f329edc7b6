"""Audit of the training data: rows and tokens of every source and in total, histograms, and the padding of batches."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from finetune.config.sections.data import AuditSection
from finetune.data.batch import Batch
from finetune.data.features import Features
from finetune.data.order.order import DatasetView, permutation
from finetune.data.template_check import TemplateCheck
from finetune.data.token_cache.counts import (
    REMEDY,
    Counts,
    Share,
    exceeded_shares,
    num_duplicates,
    shares,
    total_counts,
)
from finetune.data.token_cache.store import TokenCache
from finetune.errors import DataError

MAX_MEASURED_SAMPLES = 4096
"""The number of samples after which the share is accurate enough."""


@dataclass(frozen=True)
class Padding:
    """The measured batches, compared with plain padded batches of the same samples."""

    num_batches: int
    num_samples: int
    tokens: int
    computed: int  # positions of these batches, padding included
    plain_computed: int  # positions of plain batches, `train.microbatch_size` samples each, in random order
    num_positions: int  # of the order
    budget: int | None  # tokens per position; None if a position holds one sample

    @property
    def filled(self) -> float | None:
        """Return the mean fill of the packs or token batches; None without a budget."""
        return self.tokens / (self.num_positions * self.budget) if self.budget and self.num_positions else None

    @property
    def share(self) -> float:
        """Return the share of padding in the computed positions."""
        return 1 - self.tokens / self.computed if self.computed else 0.0

    @property
    def plain_share(self) -> float:
        """Return the share of padding of plain padded batches."""
        return 1 - self.tokens / self.plain_computed if self.plain_computed else 0.0

    @property
    def saved(self) -> float:
        """Return the share of the positions of plain batches that is saved."""
        return 1 - self.computed / self.plain_computed if self.plain_computed else 0.0


def measure_padding(
    view: DatasetView,
    collate: Callable[[Sequence[Features]], Batch],
    *,
    global_batch_size: int,
    microbatch_size: int,
    budget: int | None = None,
) -> Padding:
    """Return the padding of the order's first steps: at least one step, at most an epoch."""
    num_batches = num_positions = computed = tokens = 0
    lengths: list[int] = []
    start, last = 0, view.order.num_positions or 0
    while start == 0 or (len(lengths) < MAX_MEASURED_SAMPLES and start + global_batch_size <= last):
        for ids in view.order.cut(start, start + global_batch_size, microbatch_size):
            batch = collate([view.samples[sample_id] for sample_id in ids.tolist()])
            num_batches, num_positions = num_batches + 1, num_positions + microbatch_size
            has_all_lengths = len(batch.lengths) == len(ids)  # the encoder of a seq2seq model reads the source only
            lengths.extend(batch.lengths if has_all_lengths else view.samples.lengths_of(ids).tolist())
            tokens += sum(batch.lengths) if has_all_lengths else batch.num_tokens
            computed += math.prod(batch.positions)
        start += global_batch_size
    plain = plain_computed(np.array(lengths, np.int64), microbatch_size=microbatch_size)
    return Padding(num_batches, len(lengths), tokens, computed, plain, num_positions, budget)


def plain_computed(lengths: np.ndarray, *, microbatch_size: int) -> int:
    """Return the positions of padded batches of these samples in random order."""
    shuffled = lengths[permutation(len(lengths), "plain")]
    starts = np.arange(0, len(lengths), microbatch_size)
    sizes = np.minimum(microbatch_size, len(lengths) - starts)
    return int((np.maximum.reduceat(shuffled, starts) * sizes).sum())


QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class Histogram:
    """Bars of equal width; bar i counts the values in [edges[i], edges[i + 1]), the last one its upper edge, too."""

    edges: tuple[float, ...]  # one more than bars
    bars: tuple[int, ...]


def histogram(values: np.ndarray, *, upper: float, num_bars: int) -> Histogram:
    """Return a histogram of the values from 0 to `upper` with `num_bars` bars."""
    bars, edges = np.histogram(values, bins=num_bars, range=(0.0, upper))
    return Histogram(tuple(round(float(edge), 6) for edge in edges), tuple(int(bar) for bar in bars))


def length_histogram(lengths: np.ndarray, *, max_bars: int = 32) -> Histogram:
    """Return a histogram of lengths whose bars are whole numbers of tokens wide; no bars without lengths."""
    longest = int(lengths.max()) if len(lengths) else 0
    width = -(-(longest + 1) // max_bars)
    num_bars = -(-(longest + 1) // width)
    return histogram(lengths, upper=width * num_bars, num_bars=num_bars)


def quantiles(values: np.ndarray) -> dict[str, int]:
    """Return quantiles, which are values that occur, from minimum to maximum; empty without values.

    >>> quantiles(np.array([1, 2, 3, 4]))["p50"]
    2
    """
    if not len(values):
        return {}
    selected = np.quantile(values, QUANTILES, method="inverted_cdf")
    return {f"p{100 * share:g}": int(value) for share, value in zip(QUANTILES, selected, strict=True)}


VERSION = 1
"""The format version of `audit.json`."""


@dataclass(frozen=True)
class Streamed:
    """A streamed source: only the counts of the windows prepared so far are known."""

    count: Callable[[], Counts]

    @property
    def counts(self) -> Counts:
        """Return the counts of all windows that have been prepared so far."""
        return self.count()


@dataclass(frozen=True)
class SourceAudit:
    """The audit of one source, or of all."""

    key: str  # its key in the job YAML, or `total`
    counts: Counts
    is_streamed: bool
    duplicates: int | None  # samples equal to an earlier one of any source; None for a stream
    in_validation: int | None  # training samples that equal a validation sample; None without validation
    length_quantiles: Mapping[str, int]  # in tokens
    lengths: Histogram | None
    target_shares: Histogram | None  # targets per token, of each sample

    @property
    def masked_tokens(self) -> int:
        """Return the number of tokens that are not targets."""
        return self.counts.tokens - self.counts.targets


@dataclass(frozen=True)
class Exceeded:
    """A share of a source that exceeds a limit of `data.audit`."""

    key: str  # of the source
    share: Share

    def __str__(self) -> str:
        return f"{self.key}: {self.share}"


@dataclass(frozen=True)
class Audit:
    """The audit of a run's training data."""

    sources: tuple[SourceAudit, ...]
    total: SourceAudit
    validation: SourceAudit | None
    padding: Padding | None  # None if a stream would have to be waited for
    template: TemplateCheck | None  # None if nothing is rendered
    exceeded: tuple[Exceeded, ...]
    classes: Mapping[str, int] = field(default_factory=dict)  # training samples by class, if samples have classes
    num_sequences: int = 0  # of training samples with several texts

    def as_json(self) -> dict[str, Any]:
        """Return the audit as JSON values, including derived ones (masked tokens, shares)."""
        plain = {"version": VERSION, **asdict(self)}
        plain["template"] = self.template.as_json() if self.template else None
        if not self.num_sequences:
            del plain["num_sequences"]
        written = zip((*self.sources, self.total), (*plain["sources"], plain["total"]), strict=True)
        for audit, values in [*written, *([(self.validation, plain["validation"])] if self.validation else [])]:
            values["counts"]["masked_tokens"] = audit.masked_tokens
            values["shares"] = {share.name: share.value for share in shares(audit.counts, audit.duplicates or 0)}
        if self.padding:
            plain["padding"] |= {"share": self.padding.share, "plain_share": self.padding.plain_share}
        return plain


def audit_sources(
    sources: Mapping[str, TokenCache | Streamed],
    *,
    validation: TokenCache | None = None,
    limits: AuditSection | None = None,
    padding: Padding | None = None,
    template: TemplateCheck | None = None,
    classes: Mapping[str, int] | None = None,
    num_sequences: int = 0,
) -> Audit:
    """Return the audit of the training sources, which are given by their keys in the job YAML."""
    prepared = {key: each for key, each in sources.items() if not isinstance(each, Streamed)}
    duplicates = dict(zip(prepared, num_duplicates([each.digests for each in prepared.values()]), strict=True))
    audits = tuple(
        SourceAudit(key, each.counts, True, None, None, {}, None, None)
        if isinstance(each, Streamed)
        else _audit(key, each, duplicates[key], validation)
        for key, each in sources.items()
    )
    total = SourceAudit(
        "total",
        total_counts(each.counts for each in audits),
        any(each.is_streamed for each in audits),
        _sum([each.duplicates for each in audits]),
        _sum([each.in_validation for each in audits]),
        **_spread(list(prepared.values())),
    )
    held_out = None
    if validation is not None:
        (num,) = num_duplicates([validation.digests])
        held_out = _audit("data.validation", validation, num, None)
    return Audit(
        sources=audits,
        total=total,
        validation=held_out,
        padding=padding,
        template=template,
        exceeded=tuple(
            Exceeded(each.key, share)
            for each in audits
            if limits is not None
            for share in exceeded_shares(each.counts, each.duplicates or 0, limits)
        ),
        classes=dict(classes or {}),
        num_sequences=num_sequences,
    )


def refuse_exceeded(sources: Mapping[str, TokenCache | Streamed], limits: AuditSection) -> None:
    """Raise DataError if duplicates, counted across sources, exceed the limit of `data.audit`."""
    if len(sources) > 1 and limits.max_duplicate_samples is not None:
        limits_exceeded = audit_sources(sources, limits=limits).exceeded
        if limits_exceeded:
            raise DataError("\n".join(f"{excess} {REMEDY}" for excess in limits_exceeded))


def _audit(key: str, prepared: TokenCache, duplicates: int, validation: TokenCache | None) -> SourceAudit:
    held_out = None if validation is None else int(np.isin(prepared.digests, validation.digests).sum())
    return SourceAudit(key, prepared.counts, False, duplicates, held_out, **_spread([prepared]))


def _spread(prepared: Sequence[TokenCache]) -> dict[str, Any]:
    """Return the distributions of lengths and target shares over the samples."""
    if not prepared:
        return {"length_quantiles": {}, "lengths": None, "target_shares": None}
    lengths = np.concatenate([each.lengths for each in prepared])
    targets = np.concatenate([each.num_targets_each for each in prepared])
    return {
        "length_quantiles": quantiles(lengths),
        "lengths": length_histogram(lengths),
        "target_shares": histogram(targets / np.maximum(lengths, 1), upper=1.0, num_bars=20),
    }


def _sum(numbers: Sequence[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None
