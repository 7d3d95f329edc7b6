"""Chunks come in the order of their rows, whoever encodes them; no worker is left behind."""

import multiprocessing
import os
import select
from contextlib import closing

import pytest

from finetune.data.features import UNLABELED
from finetune.data.formats.columns import NOTES
from finetune.data.formats.conversations import OWN_PROMPT
from finetune.data.rows import RawRow
from finetune.data.token_cache import chunks
from finetune.data.token_cache.chunks import EncoderPool, Encoding, WorkersLost, cut_into_chunks, encode_chunk
from finetune.data.token_cache.lengths import SampleLengthLimit
from tests.data.byte_encoding import AsWritten, EncodeForever, encode_bytes, encode_in_the_main_process_only


def rows(number, *, text="a>b"):
    return (RawRow("f", n, b'{"text": "%s"}' % text.encode()) for n in range(1, number + 1))


def recipe(encode):
    return Encoding(encode, None, {}, length=SampleLengthLimit(100, "refuse"), format=AsWritten())


def assume_device(rows, encode, *, num_workers):
    with closing(EncoderPool(recipe(encode), num_workers=num_workers)) as encoders:
        return list(encoders.encode(rows))


def test_a_chunk_is_full_by_rows_or_by_bytes(monkeypatch):
    monkeypatch.setattr(chunks, "ROWS_PER_CHUNK", 4)
    assert [len(chunk) for chunk in cut_into_chunks(rows(10))] == [4, 4, 2]
    monkeypatch.setattr(chunks, "BYTES_PER_CHUNK", 300)
    assert [len(chunk) for chunk in cut_into_chunks(rows(5, text="x" * 140))] == [2, 2, 1]
    assert list(cut_into_chunks(rows(0))) == []


def test_notes_of_formats_and_unlabeled_rows_are_counted():
    class Noting(AsWritten):
        def read(self, raw):
            row = {"text": "a>b"} if raw.number % 2 else {"text": "a>b", NOTES: ("ctx", OWN_PROMPT)}
            return {**row, NOTES: ("ctx",)} if raw.number == 3 else row

    def encode(given):
        assert not any(NOTES in row for row in given)
        return [UNLABELED, *encode_bytes(given[1:])]

    encoding = Encoding(encode, None, {}, length=SampleLengthLimit(100, "refuse"), format=Noting())
    counts = encode_chunk(encoding, list(rows(4))).counts
    assert (counts.rows, counts.samples, counts.unlabeled_rows, counts.rows_without_target) == (4, 3, 1, 0)
    assert (counts.lacking_rows, counts.own_prompt_rows, counts.first_own_prompt) == ({"ctx": 3}, 2, "f, row 2")
    twice = counts.plus(counts)
    assert (twice.lacking_rows, twice.unlabeled_rows, twice.first_own_prompt) == ({"ctx": 6}, 2, "f, row 2")
    lines = "\n".join(twice.lines())
    assert "left out without a label: 2 rows" in lines
    assert "without the column `ctx`: 6 rows" in lines
    assert (
        "the answers of 4 rows begin with a question of their own, which is not exactly `prompt` (the first: f, row 2)"
        in lines
    )


def test_an_abruptly_ended_worker_is_reported_with_the_setting_to_lower(only_workers):
    with pytest.raises(WorkersLost, match=r"exited unexpectedly.* Lower data\.prepare_workers"):
        assume_device(rows(5), encode_in_the_main_process_only, num_workers=1)


def test_a_worker_ends_when_its_parent_is_killed(only_workers, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    encode = EncodeForever(str(pipe))
    fork = multiprocessing.get_context("fork")
    parent = fork.Process(target=lambda: assume_device(rows(5), encode, num_workers=1))
    parent.start()
    assert read_when_ready(reading) == b"begun\n"
    parent.kill()
    assert read_when_ready(reading) == b""  # nobody has it open for writing any longer
    parent.join()
    os.close(reading)


def read_when_ready(descriptor):
    waiting = select.poll()  # `select` takes no descriptor above 1,023
    waiting.register(descriptor, select.POLLIN)
    assert waiting.poll(30_000), "nothing came"
    return os.read(descriptor, 100)
