"""A resume takes the size that was found where nothing has changed, and looks again where something has."""

from types import SimpleNamespace

import pytest

from finetune.run.setup.microbatch.choose import MemoryLimits
from finetune.run.setup.microbatch.record import MICROBATCH_FILE, MicrobatchRecord, read_record, write_record
from finetune.run.setup.microbatch.resolve import _sizes_after, _still_holds

RECORD = MicrobatchRecord(microbatch_size=4, strategy="single", processes=1, peaks={"memory": 500}, settings={})
SIZES = (1, 2, 4, 8)


def context_of(strategy="single"):
    logged = []
    config = SimpleNamespace(train=SimpleNamespace(global_batch_size=8))
    return SimpleNamespace(strategy=SimpleNamespace(name=strategy), config=config, log=logged.append, logged=logged)


def still_holds(record=RECORD, *, strategy="single", limit=1000, sizes=SIZES, monkeypatch, settings=()):
    monkeypatch.setattr("finetune.run.setup.microbatch.resolve.memory_settings", lambda _: dict(settings))
    tries = SimpleNamespace(memories=[SimpleNamespace(name="memory")], limits=MemoryLimits((100,), (limit,)))
    return _still_holds(record, context_of(strategy), tries, sizes=sizes)


def test_a_record_is_read_as_it_was_written(tmp_path):
    write_record(tmp_path, RECORD)
    assert read_record(tmp_path) == RECORD


@pytest.mark.parametrize("text", [None, "", "{}", "[1]", '{"microbatch_size": "many"}'])
def test_where_nothing_can_be_read_nothing_is_remembered(tmp_path, text):
    if text is not None:
        (tmp_path / MICROBATCH_FILE).write_text(text)
    assert read_record(tmp_path) is None


def test_the_size_is_kept_where_nothing_has_changed(monkeypatch):
    assert still_holds(monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    "changed",
    [
        {"strategy": "fsdp2"},
        {"limit": 500},
        {"sizes": (1, 3)},
        {"settings": {"model.attention": "eager"}},
        {"record": RECORD.model_copy(update={"processes": 2})},
        {"record": RECORD.model_copy(update={"microbatch_size": 16})},
    ],
)
def test_it_is_not_just_taken_where_something_has(monkeypatch, changed):
    assert not still_holds(monkeypatch=monkeypatch, **changed)


def test_none_larger_than_the_one_that_was_found_is_tried_again():
    context = context_of("fsdp2")
    assert _sizes_after(RECORD, context, SIZES) == [1, 2, 4]
    assert "4 was found under single on 1 processes" in context.logged[0]


def test_all_sizes_are_tried_where_the_one_that_was_found_no_longer_divides():
    context = context_of("ddp")
    assert _sizes_after(RECORD, context, (1, 3)) == (1, 3)
    assert "8 / 1 is not a multiple of it. It is found anew" in context.logged[0]
