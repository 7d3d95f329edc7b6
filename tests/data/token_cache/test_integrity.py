"""What was consumed, as a digest: the same however a step is cut, another one when a single sample is another."""

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from finetune.data.batch import Batch
from finetune.data.loader import train_loader
from finetune.data.order.mixing import MixedSamples
from finetune.data.order.order import DatasetView, SetOrder, source_offset
from finetune.data.sources.source import open_source
from finetune.data.token_cache.cache import prepare_set
from finetune.data.token_cache.chunks import Encoding
from finetune.data.token_cache.integrity import (
    SampleVerifier,
    digest_of_step_ids,
    digest_of_steps,
    extend_digest,
    ids_checksum,
    join_uint64,
    require_intact,
    samples_checksum,
    split_uint64,
    step_checksum,
    with_checksums,
)
from finetune.data.token_cache.samples import ArrayFile
from finetune.data.token_cache.store import PrecomputedArrays, PrecomputedWriter, TokenCache
from finetune.errors import DataError
from tests.data.byte_encoding import encode_bytes, flip


@dataclass(frozen=True)
class Marked:
    """Samples of which nothing is known but their marks."""

    checksums: np.ndarray

    def checksums_of(self, sample_ids):
        return self.checksums[sample_ids]


def pool_of(num_samples, *, seed=1, changed=None):
    marks = np.arange(num_samples, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    if changed is not None:
        marks[changed] ^= np.uint64(1)
    return DatasetView(Marked(marks), SetOrder(seed=seed, num_positions=num_samples), "f")


def test_the_checksum_of_a_step_is_the_sum_over_its_ranks():
    pool = pool_of(50)
    ids = pool.order.samples(8, 16)
    marks = pool.samples.checksums_of(ids)
    ranks = [samples_checksum(ids[start::2], marks[start::2]) for start in (0, 1)]
    sums = [sum(split_uint64(each)[half] for each in ranks) for half in (0, 1)]
    assert step_checksum(pool, 1, global_batch_size=8) == join_uint64(*sums) == samples_checksum(ids[::-1], marks[::-1])
    assert samples_checksum([*ids[:-1], ids[-1] + 1], marks) != samples_checksum(ids, marks)
    assert samples_checksum([], []) == 0


def test_the_sum_of_a_thousand_ranks_is_exact_in_64_bits():
    each = 2**64 - 1
    low, high = (1000 * half for half in split_uint64(each))
    assert max(low, high) < 2**63
    assert join_uint64(low, high) == 1000 * each % 2**64


def test_the_digest_rolls_on_step_by_step_and_into_the_next_epoch():
    pool = pool_of(10)
    digest = ""
    for step in range(5):
        digest = extend_digest(digest, step_checksum(pool, step, global_batch_size=4))
    assert digest == digest_of_steps(pool, 5, global_batch_size=4)
    assert digest != digest_of_steps(pool_of(10, seed=2), 5, global_batch_size=4)
    assert digest_of_steps(pool, 0, global_batch_size=4) == ""


def test_one_bit_in_a_sample_that_was_consumed_changes_the_digest():
    pool = pool_of(10)
    first, later = pool.order.samples(0, 1)[0], pool.order.samples(9, 10)[0]
    digest = digest_of_steps(pool, 2, global_batch_size=4)
    assert digest_of_steps(pool_of(10, changed=first), 2, global_batch_size=4) != digest
    assert digest_of_steps(pool_of(10, changed=later), 2, global_batch_size=4) == digest, "it has not been consumed yet"


def test_checksums_of_older_checkpoints_are_unchanged():
    assert ids_checksum([0]) == 0xE220A8397B1DCDAF >> 24  # the first output of splitmix64 seeded with 0
    digest = hashlib.sha256(f"/{0xE220A8397B1DCDAF >> 24}".encode()).hexdigest()
    assert (
        digest_of_step_ids(SetOrder(seed=1, num_positions=1), 1, global_batch_size=1)
        == extend_digest("", ids_checksum([0]))
        == digest
    )


def test_a_mark_is_the_same_on_every_machine_and_in_every_year():
    assert samples_checksum([0], [0]) == 0xA706DD2F4D197E6F  # splitmix64 seeded with its own first output


NUM_ROWS, STEP = 12, 4
CHUNK = "chunk-000000.bin"


@pytest.fixture
def prepare(write_rows, make_section):
    """Return a function that prepares the rows of a file of that name."""

    def prepare(name="rows"):
        source = write_rows([{"text": f"{name}>{number}"} for number in range(NUM_ROWS)], name=f"{name}.jsonl")
        opened = open_source(source, key="data.train", log=lambda _: None)
        section = make_section(source, num_workers=0)
        return prepare_set(opened, Encoding(encode_bytes, section, identity={}), log=lambda _: None), section

    return prepare


def collate(features):
    return Batch({}, torch.zeros(len(features), 1), len(features), 0, tuple(each.sample_id for each in features))


def pool_of_delivery(samples, *, num=NUM_ROWS):
    return DatasetView(samples, SetOrder(seed=1, num_positions=num), "f")


def batches(pool, section, **how):
    loader = train_loader(
        pool, collate, global_batch_size=STEP, microbatch_size=2, first_step=0, num_steps=2, section=section, **how
    )
    return list(loader)


def known_of(prepared, folder):
    folder.mkdir()
    writer = PrecomputedWriter(folder)
    writer.append([{"logp": np.array([number], np.float32)} for number in range(len(prepared))])
    writer.finish({})
    return TokenCache(prepared.folder, PrecomputedArrays(folder), shards=prepared.shards)


def asides(folder):
    return [path.name for path in folder.parent.iterdir() if path.name.startswith(".damaged-")]


@pytest.mark.parametrize("workers", [0, 1])
def test_intact_samples_have_the_checksum_expected_by_the_order(prepare, workers):
    prepared, section = prepare()
    pool = pool_of_delivery(prepared)
    section = section.model_copy(update={"num_workers": workers})
    one, two, *_ = batches(pool, section)
    sample_verifier = SampleVerifier(pool, STEP)
    delivery = sample_verifier.received([one, two])
    assert delivery.checksum == sample_verifier.expected(0) != sample_verifier.expected(1)
    assert delivery.damaged == ()
    require_intact(prepared, one.sample_ids, one.checksums)


def test_damage_on_the_disk_after_the_start_is_found_in_the_samples_and_set_aside(prepare):
    prepared, section = prepare()
    pool = pool_of_delivery(prepared)
    flip(prepared.folder / CHUNK, every=1)
    one, two, *_ = batches(pool, section)
    sample_verifier = SampleVerifier(pool, STEP)
    delivery = sample_verifier.received([one, two])
    assert delivery.damaged == (*one.sample_ids, *two.sample_ids)
    assert delivery.checksum != sample_verifier.expected(0)
    what, then = sample_verifier.explain(delivery.damaged)
    assert f"rows.jsonl, row {delivery.damaged[0] + 1}" in what
    assert "Run the same command again: it rebuilds the set and resumes from the last checkpoint" in then
    assert len(asides(prepared.folder)) == 1
    (told,) = sample_verifier.explain(delivery.damaged)[1:]  # another rank
    assert "was damaged and renamed by another process" in told
    again, _ = prepare()
    assert digest_of_steps(pool_of_delivery(again), 2, global_batch_size=STEP) == digest_of_steps(
        pool, 2, global_batch_size=STEP
    )


def test_damage_in_the_memory_of_a_process_sets_nothing_aside(prepare, monkeypatch):
    prepared, section = prepare()
    read = TokenCache.__getitem__

    def with_a_flipped_bit(self, index):
        features = read(self, index)
        return replace(features, arrays={**features.arrays, "input_ids": features.arrays["input_ids"] ^ 1})

    with monkeypatch.context() as patch:
        patch.setattr(TokenCache, "__getitem__", with_a_flipped_bit)
        (batch, *_) = batches(pool_of_delivery(prepared), section)
    with pytest.raises(DataError, match="the copy on disk is intact: it was corrupted in the memory of a process"):
        require_intact(prepared, batch.sample_ids, batch.checksums)
    assert asides(prepared.folder) == []


def test_damage_that_makes_collation_fail_is_reported_as_damage(prepare):
    prepared, section = prepare()
    flip(prepared.folder / CHUNK, every=1)

    def fails(features):
        raise IndexError("a sample without a token")

    loader = train_loader(
        pool_of_delivery(prepared),
        fails,
        global_batch_size=STEP,
        microbatch_size=2,
        first_step=0,
        num_steps=1,
        section=section,
    )
    with pytest.raises(DataError, match=r"rows\.jsonl, row \d+; .*differs from the prepared sample"):
        list(loader)


def test_a_label_that_has_changed_is_as_bad_as_a_token(prepare):
    prepared, section = prepare()
    path = prepared.folder / CHUNK
    arrays = ArrayFile(path).arrays
    start = arrays["is_target.values"].ctypes.data - arrays["input_ids.values"].ctypes.data
    flip(path, every=1, start=start, stop=start + arrays["is_target.values"].nbytes)
    delivery = SampleVerifier(pool_of_delivery(prepared), STEP).received(batches(pool_of_delivery(prepared), section))
    assert delivery.damaged


def test_only_the_damaged_source_of_a_mix_is_named_and_set_aside(prepare):
    (first, _), (second, _) = prepare("first"), prepare("second")
    flip(second.folder / CHUNK, every=1)
    samples = MixedSamples((first, second))
    ids = [3, source_offset(1) + 5]
    batch = train_batch(samples, ids)
    delivery = SampleVerifier(DatasetView(samples, SetOrder(1, 1), "f"), 1).received([batch])
    assert delivery.damaged == (source_offset(1) + 5,)
    with pytest.raises(DataError, match=r"second\.jsonl, row 6"):
        require_intact(samples, batch.sample_ids, batch.checksums)
    assert asides(first.folder) == [f".damaged-{second.folder.name}-1"]


def train_batch(samples, ids):
    features = [samples[each] for each in ids]
    return with_checksums(collate(features), features)


def test_precomputed_arrays_are_verified_and_not_part_of_the_digest_of_consumed_samples(prepare, tmp_path):
    """It is made of floats, which another machine may compute otherwise, and a run may go on there."""
    prepared, section = prepare()
    known = known_of(prepared, tmp_path / "known")
    pool = pool_of_delivery(known)
    delivery = SampleVerifier(pool, STEP).received(batches(pool, section)[:2])
    assert delivery.damaged == ()
    assert delivery.checksum == SampleVerifier(pool_of_delivery(prepared), STEP).expected(0)
    flip(tmp_path / "known" / CHUNK, every=1, start=0)
    damaged = batches(pool, section)[0]
    with pytest.raises(DataError, match=r"known is damaged and was renamed to \.damaged-known-1"):
        require_intact(known, damaged.sample_ids, damaged.checksums)
    assert asides(prepared.folder) == []


def test_a_partner_is_compared_too(prepare):
    prepared, section = prepare()
    pool = pool_of_delivery(prepared)
    whole = batches(pool, section, has_partners=True)[0]
    assert SampleVerifier(pool, STEP).received([whole]).damaged == ()
    assert len(whole.partner_ids) == len(whole.sample_ids)
    other = replace(whole, partner_checksums=tuple(each ^ 1 for each in whole.partner_checksums))
    assert SampleVerifier(pool, STEP).received([other]).damaged == whole.partner_ids
