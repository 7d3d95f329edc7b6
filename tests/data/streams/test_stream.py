"""The order of a stream follows from the samples of each window alone, wherever it begins."""

import os
import re
import signal
import time

import fsspec
import numpy as np
import pytest

from finetune.config.sections.data import StreamSection, TrainingSourceSection
from finetune.data.order.order import SetOrder, split_stream_index, window_offset
from finetune.data.sources.source import open_source
from finetune.data.streams import windows as stream_maker
from finetune.data.streams.stream import _COMMAND, StreamOrder, stream_view
from finetune.data.streams.windows import NUM_KEPT_WINDOWS, make_window, prepare_next
from finetune.data.token_cache.chunks import Encoding
from finetune.data.token_cache.integrity import sample_checksum
from finetune.errors import DataError
from tests.data.byte_encoding import encode_bytes, flip

SIZES = [5, 0, 3, 7, 2]


class Arranged:
    """Windows of so many samples, over and over; remembers which were asked for."""

    def __init__(self, sizes=SIZES):
        self.sizes = sizes
        self.asked = []

    def __call__(self, window):
        self.asked.append(window)
        size = self.sizes[window % len(self.sizes)]
        return SetOrder(seed=window, num_positions=size) if size else None


def places(ids):
    return [split_stream_index(each) for each in ids.tolist()]


def test_window_follows_window_and_each_sample_comes_once():
    ids = StreamOrder(Arranged()).samples(0, 17)
    windows = [window for window, _ in places(ids)]
    assert windows == [0] * 5 + [2] * 3 + [3] * 7 + [4] * 2
    for window, size in enumerate(SIZES):
        assert sorted(index for each, index in places(ids) if each == window) == list(range(size))


def test_a_stream_order_can_start_at_any_position():
    whole = StreamOrder(Arranged()).samples(0, 60)
    for start in range(0, 60, 7):
        assert StreamOrder(Arranged()).samples(start, 60).tolist() == whole[start:].tolist()
    order = StreamOrder(Arranged())
    pieces = [order.samples(start, min(start + 4, 60)) for start in range(0, 60, 4)]
    assert np.concatenate(pieces).tolist() == whole.tolist()
    assert [piece.tolist() for piece in order.cut(3, 20, 8)] == [
        whole[3:11].tolist(),
        whole[11:19].tolist(),
        [whole[19]],
    ]


IDENTITY = {"tokenizer": "t1"}


class Nobody:
    """A process that does not exist."""

    def end(self):
        pass


class Streams:
    """Stream the letters of a few files, one row each."""

    def __init__(self, write_rows, make_section, tmp_path):
        self.write_rows, self.make_section, self.folder = write_rows, make_section, tmp_path
        self.said = []
        self.opened = []

    def write(self, *files):
        for number, texts in enumerate(files):
            self.write_rows([{"text": text} for text in texts], name=f"part-{number}.jsonl")

    def open(self, *, path=None, window_rows=3, cache="cache", num_ahead=1, **keys):
        stream = StreamSection(window_rows=window_rows, num_ahead=num_ahead)
        source = TrainingSourceSection(path=path or str(self.folder / "part-*.jsonl"), stream=stream)
        section = self.make_section(source, cache_folder=str(self.folder / cache), **keys)
        opened = open_source(source, key="data.train", log=self.said.append)
        pool, _ = stream_view(opened, Encoding(encode_bytes, section, identity=IDENTITY), seed=5, log=self.said.append)
        self.opened.append(pool)
        return pool


@pytest.fixture
def streams(write_rows, make_section, tmp_path):
    made = Streams(write_rows, make_section, tmp_path)
    made.write([f"a>{n}" for n in range(4)], [f"b>{n}" for n in range(7)], [f"c>{n}" for n in range(2)])
    yield made
    for pool in made.opened:
        pool.samples.windows.close()


@pytest.fixture
def no_process(monkeypatch):
    """Have nothing prepared but what the test prepares itself."""
    monkeypatch.setattr("finetune.data.streams.stream.ProducerProcess", lambda job, *, lock: Nobody())


def texts_of(pool, start, stop):
    ids = pool.order.samples(start, stop).tolist()
    return [bytes(pool.samples[each].arrays["input_ids"].astype(np.uint8)).decode() for each in ids]


def job_of(pool):
    return pool.samples.windows.job


def maker_of(pool):
    return pool.samples.windows._producers[-1]


def test_every_pass_has_every_row_and_the_disk_holds_a_few_windows(streams):
    pool = streams.open()
    most, texts = 0, []
    for start in range(0, 52, 4):
        texts += texts_of(pool, start, start + 4)
        most = max(most, len(job_of(pool).folder.windows()))
        if start == 24:
            os.kill(maker_of(pool).process.pid, signal.SIGKILL)  # another one takes its place
    rows = sorted([f"a>{n}" for n in range(4)] + [f"b>{n}" for n in range(7)] + [f"c>{n}" for n in range(2)])
    passes = [texts[first : first + 13] for first in (0, 13, 26, 39)]
    assert all(sorted(each) == rows for each in passes)
    assert len({tuple(each) for each in passes}) == 4
    assert most <= NUM_KEPT_WINDOWS + 1 + 1  # behind, in use, ahead
    assert len(pool.samples.windows._producers) == 2
    said = "\n".join(streams.said)
    assert "in windows of 3 rows, shuffled within each window; prefetched windows: 1" in said
    assert "data.train: window 4: 1 rows -> 1 samples" in said  # the last of a pass
    assert "data.train: 8 windows so far: 22 rows -> 22 samples" in said

    pool.samples.windows.close()
    again = streams.open()  # prepares a window of the past once more
    assert re.search(
        r"data\.train: 2[01] windows were prepared earlier; needed ones are prepared again", streams.said[-1]
    )
    assert texts_of(again, 26, 30) == texts[26:30]
    assert again.fingerprint == pool.fingerprint


@pytest.mark.full
def test_a_bucket_is_streamed(streams, bucket):
    storage = fsspec.filesystem("s3")
    for number in range(2):
        storage.pipe(f"bucket/stream/part-{number}.jsonl", (streams.folder / f"part-{number}.jsonl").read_bytes())
    pool = streams.open(path=f"{bucket}/stream/*.jsonl")
    assert sorted(texts_of(pool, 0, 11)) == sorted([f"a>{n}" for n in range(4)] + [f"b>{n}" for n in range(7)])
    assert "s3://bucket/stream/part-" in pool.samples.location(int(pool.order.samples(0, 1)[0]))


def test_a_row_that_cannot_be_encoded_is_reported_when_its_window_is_reached(streams):
    streams.write(["a>1", "b>2", "c>3", "d>4", "poison", "e>5"])
    for name in ("part-1.jsonl", "part-2.jsonl"):
        (streams.folder / name).unlink()
    pool = streams.open(num_ahead=2)
    assert sorted(texts_of(pool, 0, 3)) == ["a>1", "b>2", "c>3"]
    with pytest.raises(DataError, match=r"part-0\.jsonl, row 5: cannot be encoded"):
        pool.order.samples(3, 4)


def prepared(pool, *windows):
    for window in windows:
        make_window(job_of(pool), window)
    return pool


def test_another_machine_makes_the_same_windows(streams, no_process):
    here, there = (prepared(streams.open(cache=cache), 0, 1, 2) for cache in ("here", "there"))
    assert texts_of(here, 0, 9) == texts_of(there, 0, 9)
    for window in range(3):
        files = [sorted(job_of(pool).folder.window(window).iterdir()) for pool in (here, there)]
        assert [path.name for path in files[0]] == ["chunk-000000.bin", "counts.json", "samples.bin"]
        assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


def test_lengths_outlive_the_tokens(streams, no_process):
    streams.write(["a>", "b>22", "c>333"])
    pool = prepared(streams.open(shuffle=False), 0, 1)
    job_of(pool).folder.delete_window(0)
    ids = np.array([window_offset(0) + 2, window_offset(1), window_offset(0)])
    assert pool.samples.lengths_of(ids).tolist() == [5, 3, 2]
    assert pool.samples.windows.if_prepared(0) is None
    first, second = pool.samples.location(window_offset(0) + 2), pool.samples.location(window_offset(1))
    assert first == f"sample 2 of window 0 (starting at {streams.folder}/part-0.jsonl after 0 of its rows)"
    assert second == f"{streams.folder}/part-1.jsonl, row 1"


def test_settings_that_decide_the_stream_order_are_part_of_the_fingerprint(streams, no_process):
    first = streams.open()
    changes = ({"window_rows": 4}, {"shuffle": False}, {"max_length": 9}, {"batching": {"by": "packs", "tokens": 64}})
    others = [streams.open(**change) for change in changes]
    assert len({pool.fingerprint for pool in (first, *others)}) == 5
    same = streams.open(num_ahead=7, cache="elsewhere", batching={"padding_free": True})
    assert same.fingerprint == first.fingerprint


def test_a_window_of_which_nothing_is_left_is_passed_over(streams, no_process):
    streams.write(["a>1", "b>2", "c>3", "", "", "", "d>4"])
    for name in ("part-1.jsonl", "part-2.jsonl"):
        (streams.folder / name).unlink()
    pool = prepared(streams.open(no_target="drop"), 0, 1, 2)
    assert sorted(texts_of(pool, 0, 3)) + texts_of(pool, 3, 4) == ["a>1", "b>2", "c>3", "d>4"]
    assert split_stream_index(int(pool.order.samples(3, 4)[0])) == (2, 0)
    (total,) = [line for line in streams.said if "2 windows so far: 6 rows -> 3 samples" in line]
    assert "dropped without a target: 3 rows" in total


def test_a_pass_of_which_nothing_is_left_is_an_error(streams, no_process):
    streams.write(["a", "b"], ["c"], ["d"])
    pool = prepared(streams.open(no_target="drop"), 0, 1)
    with pytest.raises(
        DataError,
        match=r"data\.train: a whole pass over the stream leaves no sample: 4 rows -> 0 "
        r"samples",
    ):
        pool.order.samples(0, 1)


def test_rows_that_the_section_refuses_are_named_with_their_window(streams, no_process):
    pool = streams.open(max_length=4, shuffle=False)
    streams.write(["a>1", "b>2", "c>3", "d>4"], ["a>1", "b>long"])
    make_window(job_of(pool), 0)
    with pytest.raises(DataError, match=r"^data\.train: window 1: 1 of 3 rows are longer than data\.max_length: 4"):
        make_window(job_of(pool), 1)


def test_a_full_disk_is_reported_and_the_partial_window_is_removed(streams, no_process, monkeypatch):
    pool = streams.open()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stream_maker, "build_set", full)
    error = stream_maker._prepare_window(job_of(pool), 0)
    assert "data.cache_folder: writing window 0 of data.train to" in error
    assert "No space left on device" in error
    assert list((job_of(pool).folder.path / "windows").iterdir()) == []


@pytest.mark.parametrize(("cause", "pauses"), [(ConnectionError("gone"), [1.0, 5.0, 25.0]), (ValueError("bad"), [])])
def test_storage_that_does_not_answer_is_asked_again(streams, no_process, monkeypatch, cause, pauses):
    waited = []
    monkeypatch.setattr(stream_maker.time, "sleep", waited.append)

    def away(*_):
        raise DataError("part-0.jsonl: cannot be read") from cause
        yield

    job = job_of(streams.open())
    monkeypatch.setattr("finetune.data.sources.slices.SliceShard.rows", away)
    assert stream_maker._prepare_window(job, 0) == "part-0.jsonl: cannot be read"
    assert waited == pauses


def test_windows_around_the_requested_one_are_prepared_and_others_deleted(streams, no_process):
    job = job_of(streams.open(num_ahead=1))
    prepared = []
    for requested in (0, 4, 3):
        job.folder.request(requested)
        while prepare_next(job):
            pass
        prepared.append(job.folder.windows())
    assert prepared == [{0, 1}, {2, 3, 4, 5}, {2, 3, 4}]


def test_a_process_that_ends_again_and_again_is_given_up(streams, monkeypatch):
    monkeypatch.setattr("finetune.data.streams.stream._COMMAND", "raise SystemExit(3)")
    pool = streams.open()
    with pytest.raises(DataError, match=r"data\.train: the process that prepares windows exited 3 times.*code 3"):
        pool.order.samples(0, 1)


def test_a_stream_process_that_is_still_importing_exits_with_its_starter(streams, monkeypatch):
    importing = _COMMAND.replace("from finetune.data.streams.windows import main", "import time; time.sleep(60)")
    assert "sleep" in importing
    monkeypatch.setattr("finetune.data.streams.stream._COMMAND", importing)
    pool = streams.open()
    process = maker_of(pool)
    started = time.monotonic()
    pool.samples.windows.close()
    assert process.process.poll() == 0
    assert time.monotonic() - started < 30


def test_a_window_that_is_damaged_is_prepared_again(streams):
    texts = texts_of(streams.open(shuffle=False), 0, 3)
    folder = job_of(streams.opened[0]).folder
    streams.opened[0].samples.windows.close()
    flip(folder.window(0) / "chunk-000000.bin", start=0)
    assert texts_of(streams.open(shuffle=False), 0, 3) == texts
    assert any("window 0: the prepared set" in line and "is damaged" in line for line in streams.said)


@pytest.mark.full
def test_a_record_that_is_damaged_is_made_again_with_its_window(streams):
    first = streams.open(shuffle=False)
    texts, ids = texts_of(first, 0, 7), first.order.samples(0, 7)
    marks = first.samples.checksums_of(ids)
    folder = job_of(first).folder
    first.samples.windows.close()
    flip(folder.path / "records" / "000001.bin", start=0)
    again = streams.open(shuffle=False)
    assert texts_of(again, 0, 7) == texts
    assert again.samples.checksums_of(ids).tolist() == marks.tolist()
    assert any("Its window will be prepared again" in line for line in streams.said)
    assert folder.record(1).exists()


def test_damage_to_a_window_during_reading_is_found_in_the_delivered_samples(streams):
    pool = streams.open(shuffle=False)
    ids = pool.order.samples(0, 3)
    sample = pool.samples[int(ids[0])]
    folder = job_of(pool).folder
    assert sample_checksum(sample.arrays) == int(pool.samples.checksums_of(ids)[0])
    flip(folder.window(0) / "chunk-000000.bin", start=24, stop=25)  # the first token of the third sample
    assert sample_checksum(pool.samples[int(ids[2])].arrays) != int(pool.samples.checksums_of(ids)[2])
    what, then = pool.samples.refuse(ids[2:])
    assert re.search(r"sample 2 of window 0 \(starting at .*part-0\.jsonl .*: differs from the prepared sample", what)
    assert "Deleted windows: 0; they are prepared again. Run the same command again" in then
    assert 0 not in folder.windows()


def test_rows_that_keep_their_lengths_and_change_are_noticed(streams, no_process):
    pool = prepared(streams.open(shuffle=False), 0)
    job_of(pool).folder.delete_window(0)
    streams.write(["a>0", "a>7", "a>2", "a>3"])
    with pytest.raises(DataError, match="has different rows than when it was first prepared"):
        make_window(job_of(pool), 0)
