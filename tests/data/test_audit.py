"""An audit says of the sources what can be counted by hand."""

import json
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from finetune.config.sections.data import AuditSection
from finetune.data.audit import (
    Streamed,
    audit_sources,
    length_histogram,
    measure_padding,
    refuse_exceeded,
)
from finetune.data.batch import Batch
from finetune.data.features import Features
from finetune.data.order.order import DatasetView, SetOrder
from finetune.data.token_cache.counts import Counts, num_duplicates, shares
from finetune.errors import DataError
from tests.refusals import refused


def test_long_lengths_share_bars_of_whole_tokens():
    found = length_histogram(np.array([10, 1000]), max_bars=32)
    assert len(found.bars) <= 32 and sum(found.bars) == 2
    assert found.edges[1] == 32.0
    assert found.edges[-1] > 1000


@dataclass(frozen=True)
class Prepared:
    """A prepared set of samples that are named by letters: equal letters are equal samples."""

    samples: str
    targets: int = 2
    counts: Counts = field(default_factory=Counts)

    @property
    def lengths(self):
        return np.array([4 + ord(letter) - ord("a") for letter in self.samples])

    @property
    def num_targets_each(self):
        return np.full(len(self.samples), self.targets)

    @property
    def digests(self):
        return np.array([ord(letter) for letter in self.samples], np.uint64)


def counted(samples, **counts):
    return Prepared(samples, counts=Counts(rows=len(samples), samples=len(samples), **counts))


def test_a_sample_that_stands_earlier_in_any_source_is_a_duplicate():
    assert num_duplicates([p.digests for p in (Prepared("abca"), Prepared("bd"), Prepared("dd"))]) == [1, 1, 2]
    assert num_duplicates([Prepared("").digests, Prepared("aa").digests, Prepared("").digests]) == [0, 1, 0]
    assert num_duplicates([Prepared("abca").digests]) == [1]
    assert num_duplicates([Prepared("").digests]) == [0]
    assert num_duplicates([]) == []


def test_the_total_is_that_of_the_sources():
    first, second = counted("aab", tokens=13, targets=6), counted("bc", tokens=11, targets=4)
    audit = audit_sources({"data.train.mix.0": first, "data.train.mix.1": second})
    assert [source.duplicates for source in audit.sources] == [1, 1]
    assert (audit.total.counts.rows, audit.total.counts.tokens, audit.total.duplicates) == (5, 24, 2)
    assert audit.total.masked_tokens == 14
    assert audit.total.length_quantiles == {
        **{"p0": 4, "p10": 4, "p25": 4, "p50": 5, "p75": 5, "p90": 6, "p99": 6, "p100": 6}
    }
    assert sum(audit.total.lengths.bars) == 5


def test_training_samples_that_are_evaluated_on_are_counted():
    audit = audit_sources({"data.train": counted("aabc")}, validation=counted("abx"))
    assert audit.sources[0].in_validation == 3
    assert audit.validation.key == "data.validation"
    assert audit_sources({"data.train": counted("a")}).sources[0].in_validation is None


def test_a_stream_has_counts_and_no_more():
    stream = Streamed(lambda: Counts(rows=7, samples=6, tokens=60))
    audit = audit_sources({"data.train.mix.0": stream, "data.train.mix.1": counted("aa")})
    assert audit.sources[0].is_streamed and audit.sources[0].duplicates is None
    assert audit.total.counts.rows == 9 and audit.total.duplicates == 1
    assert audit_sources({"data.train": stream}).total.lengths is None


def test_audit_shares_are_relative_to_the_counts_before_losses():
    counts = Counts(
        **{"rows": 10, "samples": 8, "tokens": 100, "targets": 30, "truncated_rows": 1, "split_rows": 1},
        **{"truncated_targets": 6, "dropped_targets": 4, "long_rows": 1, "rows_without_target": 1, "unknown_tokens": 5},
    )
    assert {share.name: share.value for share in shares(counts, duplicates=2)} == {
        **{"truncated_rows": 0.2, "dropped_rows": 0.2, "lost_targets": 0.25, "duplicate_samples": 0.25},
        "unknown_tokens": 0.05,
        "unread_rows": 0.0,
    }


def test_a_limit_that_is_crossed_is_named_with_by_how_much():
    limits = AuditSection(max_duplicate_samples=0.25, max_unknown_tokens=0.5)
    audit = audit_sources({"data.train": counted("aab")}, limits=limits)
    assert [str(each) for each in audit.exceeded] == [
        "data.train: 1 of 3 samples are duplicates (33.33%): data.audit.max_duplicate_samples allows 25.00%."
    ]
    assert audit_sources({"data.train": counted("aabcd")}, limits=limits).exceeded == ()


def test_samples_that_stand_in_two_sources_stop_a_run_too():
    sources = {"data.train.mix.0": counted("ab"), "data.train.mix.1": counted("bc")}
    with refused(DataError, "data.train.mix.1: 1 of 2 samples"):
        refuse_exceeded(sources, AuditSection(max_duplicate_samples=0.0))
    refuse_exceeded(sources, AuditSection())


def test_an_audit_is_plain_json():
    audit = audit_sources({"data.train": counted("aab", tokens=13, targets=6)}, validation=counted("x"))
    plain = json.loads(json.dumps(audit.as_json(), allow_nan=False))
    assert plain["version"] == 1
    assert plain["sources"][0]["counts"]["masked_tokens"] == 7
    assert plain["sources"][0]["shares"]["duplicate_samples"] == pytest.approx(1 / 3)
    assert plain["validation"]["counts"]["rows"] == 1


@dataclass(frozen=True)
class Samples:
    """Samples of these lengths."""

    lengths: tuple[int, ...]

    def __getitem__(self, sample_id):
        return Features({"input_ids": np.zeros(self.lengths[sample_id], np.uint32)}, sample_id)

    def location(self, sample_id):
        return f"row {sample_id + 1}"

    def lengths_of(self, sample_ids):
        return np.array(self.lengths)[sample_ids]


def end_to_end(features):
    return batch_of(features, rows=1, columns=sum(each.length for each in features))


def batch_of(features, *, rows, columns):
    tokens, ids = sum(each.length for each in features), tuple(each.sample_id for each in features)
    return Batch({}, torch.zeros(rows, columns), num_targets=tokens, num_tokens=tokens, sample_ids=ids)


def measured(collate, lengths=(1, 9, 2, 8, 3, 7, 4, 6), **named):
    pool = DatasetView(Samples(lengths), SetOrder(seed=0, num_positions=len(lengths), shuffle=False), "print")
    return measure_padding(pool, collate, global_batch_size=4, microbatch_size=2, **named)


def test_samples_end_to_end_have_no_padding():
    found = measured(end_to_end)
    assert found.share == 0.0
    assert found.plain_computed > 40
    assert found.saved == pytest.approx(1 - 40 / found.plain_computed)


def test_padding_of_encoder_decoder_batches_counts_encoder_positions():
    def sources(features):
        lengths = tuple(each.length - 1 for each in features)
        batch = batch_of(features, rows=len(features), columns=max(lengths))
        return replace(batch, lengths=lengths)

    found = measured(sources)
    assert (found.tokens, found.computed) == (40 - 8, 2 * (8 + 7 + 6 + 5))


def test_a_token_budget_reports_the_share_of_filled_positions():
    assert measured(end_to_end, budget=10).filled == pytest.approx(40 / 80)
    assert measured(end_to_end).filled is None
