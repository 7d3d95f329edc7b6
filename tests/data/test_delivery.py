"""What a loader has really delivered is compared with what was prepared, whatever the samples come from."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from finetune.data.batch import Batch
from finetune.data.delivery import Deliveries, marked, require_intact
from finetune.data.loader import train_loader
from finetune.data.order.consumed import digest_of
from finetune.data.order.mixing import MixedSamples
from finetune.data.order.order import SetOrder
from finetune.data.order.pool import Pool
from finetune.data.order.sample_ids import of_source
from finetune.data.prepared.cache import prepare_set
from finetune.data.prepared.known import KnownWriter, known_set
from finetune.data.prepared.store import PreparedSet
from finetune.data.sources.source import open_source
from finetune.errors import DataError
from tests.data.byte_encoding import encode_bytes

NUM_ROWS, STEP = 12, 4


@pytest.fixture
def prepare(write_rows, make_section):
    """Return a function that prepares the rows of a file of that name."""

    def prepare(name="rows"):
        source = write_rows([{"text": f"{name}>{number}"} for number in range(NUM_ROWS)], name=f"{name}.jsonl")
        opened = open_source(source, key="data.train", say=lambda _: None)
        section = make_section(source, num_workers=0)
        return prepare_set(opened, encode_bytes, section=section, identity={}, say=lambda _: None), section

    return prepare


def collate(features):
    return Batch({}, torch.zeros(len(features), 1), len(features), 0, tuple(each.sample_id for each in features))


def pool_of(samples, *, num=NUM_ROWS):
    return Pool(samples, SetOrder(seed=1, num_samples=num), "f")


def batches(pool, section, **how):
    loader = train_loader(
        pool,
        collate,
        global_batch_size=STEP,
        microbatch_size=2,
        first_step=0,
        num_steps=2,
        section=section,
        **how,
    )
    return list(loader)


def known_of(prepared, folder):
    folder.mkdir()
    writer = KnownWriter(folder)
    writer.append([{"logp": np.array([number], np.float32)} for number in range(len(prepared))])
    writer.finish({})
    writer.close()
    return known_set(prepared, folder)


def flip(path, *, every=1):
    content = bytearray(path.read_bytes())
    for place in range(128, len(content), every):
        content[place] ^= 1
    with path.open("r+b") as file:
        file.write(content)


def asides(folder):
    return [path.name for path in folder.parent.iterdir() if path.name.startswith(".damaged-")]


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_delivered_whole_has_the_mark_that_the_order_asks_for(prepare, workers):
    prepared, section = prepare()
    pool = pool_of(prepared)
    section = section.model_copy(update={"num_workers": workers})
    one, two, *_ = batches(pool, section)
    deliveries = Deliveries(pool, STEP)
    delivery = deliveries.received([one, two])
    assert delivery.mark == deliveries.expected(0) != deliveries.expected(1)
    assert (delivery.damaged, delivery.problem) == ((), None)
    require_intact(prepared, one)


def test_damage_on_the_disk_after_the_start_is_found_in_the_samples_and_set_aside(prepare):
    prepared, section = prepare()
    pool = pool_of(prepared)
    flip(prepared.folder / "input_ids.values.npy")
    one, two, *_ = batches(pool, section)
    deliveries = Deliveries(pool, STEP)
    delivery = deliveries.received([one, two])
    assert delivery.damaged == (*one.sample_ids, *two.sample_ids)
    assert delivery.mark != deliveries.expected(0)
    what, then = deliveries.explain(delivery.damaged)
    assert f"rows.jsonl, row {delivery.damaged[0] + 1}" in what
    assert "The same command makes it again and continues from the last checkpoint" in then
    assert len(asides(prepared.folder)) == 1
    (told,) = deliveries.explain(delivery.damaged)[1:]  # another rank
    assert "has been set aside by another process" in told
    again, _ = prepare()
    assert digest_of(pool_of(again), 2, global_batch_size=STEP) == digest_of(pool, 2, global_batch_size=STEP)


def test_damage_in_the_memory_of_a_process_sets_nothing_aside(prepare, monkeypatch):
    prepared, section = prepare()
    read = PreparedSet.__getitem__

    def with_a_flipped_bit(self, index):
        features = read(self, index)
        return replace(features, arrays={**features.arrays, "input_ids": features.arrays["input_ids"] ^ 1})

    with monkeypatch.context() as patch:
        patch.setattr(PreparedSet, "__getitem__", with_a_flipped_bit)
        (batch, *_) = batches(pool_of(prepared), section)
    with pytest.raises(DataError, match="on the disk it is intact: it was damaged in the memory of a process"):
        require_intact(prepared, batch)
    assert asides(prepared.folder) == []


def test_damage_at_which_collation_fails_is_told_as_what_it_is(prepare):
    prepared, section = prepare()
    flip(prepared.folder / "input_ids.offsets.npy")

    def fails(features):
        raise IndexError("a sample without a token")

    loader = train_loader(
        pool_of(prepared),
        fails,
        global_batch_size=STEP,
        microbatch_size=2,
        first_step=0,
        num_steps=1,
        section=section,
    )
    with pytest.raises(DataError, match=r"rows\.jsonl, row \d+; .*not what was prepared"):
        list(loader)


def test_a_label_that_has_changed_is_as_bad_as_a_token(prepare):
    prepared, section = prepare()
    flip(prepared.folder / "is_target.values.npy", every=7)
    delivery = Deliveries(pool_of(prepared), STEP).received(batches(pool_of(prepared), section))
    assert delivery.damaged


def test_of_a_mix_the_source_that_is_damaged_is_named_and_set_aside(prepare):
    (first, _), (second, _) = prepare("first"), prepare("second")
    flip(second.folder / "input_ids.values.npy")
    samples = MixedSamples((first, second))
    ids = [3, of_source(1) + 5]
    batch = train_batch(samples, ids)
    delivery = Deliveries(Pool(samples, SetOrder(1, 1), "f"), 1).received([batch])
    assert delivery.damaged == (of_source(1) + 5,)
    with pytest.raises(DataError, match=r"second\.jsonl, row 6"):
        require_intact(samples, batch)
    assert asides(first.folder) == [f".damaged-{second.folder.name}-1"]


def train_batch(samples, ids):
    features = [samples[each] for each in ids]
    return marked(collate(features), features)


def test_what_is_known_beside_a_sample_is_compared_and_is_no_part_of_what_was_consumed(prepare, tmp_path):
    """It is made of floats, which another machine may compute otherwise, and a run may go on there."""
    prepared, section = prepare()
    known = known_of(prepared, tmp_path / "known")
    pool = pool_of(known)
    delivery = Deliveries(pool, STEP).received(batches(pool, section)[:2])
    assert delivery.damaged == ()
    assert delivery.mark == Deliveries(pool_of(prepared), STEP).expected(0)
    flip(tmp_path / "known" / "logp.values.npy")
    damaged = batches(pool, section)[0]
    with pytest.raises(DataError, match=r"known is set aside as \.damaged-known-1"):
        require_intact(known, damaged)
    assert asides(prepared.folder) == []


def test_a_partner_is_compared_too(prepare):
    prepared, section = prepare()
    pool = pool_of(prepared)
    whole = batches(pool, section, has_partners=True)[0]
    assert Deliveries(pool, STEP).received([whole]).damaged == ()
    assert len(whole.partner_ids) == len(whole.sample_ids)
    other = replace(whole, partner_marks=tuple(each ^ 1 for each in whole.partner_marks))
    assert Deliveries(pool, STEP).received([other]).damaged == whole.partner_ids


def test_a_filler_has_no_samples_and_no_marks(prepare):
    prepared, _ = prepare()
    empty = Batch({}, torch.zeros(1, 1), 0, 0, ())
    assert Deliveries(pool_of(prepared), STEP).received([empty]).mark == 0
