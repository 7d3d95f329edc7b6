"""Chunks come in the order of their rows, whoever encodes them; no worker is left behind."""

import multiprocessing
import os
import select
import sys
from multiprocessing import active_children
from pathlib import Path

import pytest

from finetune.data import parallel
from finetune.data.chunks import Recipe
from finetune.data.lengths import LengthPolicy
from finetune.data.parallel import WorkersLost, cut, encode_chunks
from finetune.data.rows import RawRow

sys.path.append(str(Path(__file__).parent))  # handed on to spawned processes
from byte_encoding import AsWritten, EncodeForever, encode_bytes, encode_in_the_main_process_only


def rows(number, *, text="a>b"):
    return (RawRow("f", n, b'{"text": "%s"}' % text.encode()) for n in range(1, number + 1))


def recipe(encode):
    return Recipe(AsWritten(), encode, LengthPolicy(100, "refuse"))


@pytest.fixture
def only_workers(monkeypatch):
    """Have nothing encoded in the main process, neither first nor while workers start."""
    monkeypatch.setattr(parallel, "CHUNKS_BEFORE_WORKERS", 0)
    monkeypatch.setattr(parallel, "_meanwhile", lambda chunks, recipe, starting: iter(()))


def test_a_chunk_is_full_by_rows_or_by_bytes(monkeypatch):
    monkeypatch.setattr(parallel, "ROWS_PER_CHUNK", 4)
    assert [len(chunk) for chunk in cut(rows(10))] == [4, 4, 2]
    monkeypatch.setattr(parallel, "BYTES_PER_CHUNK", 300)
    assert [len(chunk) for chunk in cut(rows(5, text="x" * 140))] == [2, 2, 1]
    assert list(cut(rows(0))) == []


def test_a_small_set_starts_no_process(monkeypatch):
    monkeypatch.setattr(parallel, "ProcessPoolExecutor", None)  # calling it would raise
    chunks = list(encode_chunks(rows(500), recipe(encode_bytes), num_workers=4))
    assert sum(chunk.counts.samples for chunk in chunks) == 500


def test_the_main_process_encodes_until_a_worker_is_ready(monkeypatch):
    monkeypatch.setattr(parallel, "ROWS_PER_CHUNK", 1)
    monkeypatch.setattr(parallel, "CHUNKS_BEFORE_WORKERS", 1)
    chunks = list(encode_chunks(rows(5), recipe(encode_in_the_main_process_only), num_workers=1))
    assert [chunk.row_numbers.tolist() for chunk in chunks] == [[1], [2], [3], [4], [5]]
    assert active_children() == []


def test_a_worker_that_ends_abruptly_is_told_with_the_remedy(only_workers):
    with pytest.raises(WorkersLost, match=r"ended abruptly.* Set fewer data\.prepare_workers"):
        list(encode_chunks(rows(5), recipe(encode_in_the_main_process_only), num_workers=1))


def test_a_worker_ends_when_its_parent_is_killed(only_workers, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    encode = recipe(EncodeForever(str(pipe)))
    parent = multiprocessing.get_context("fork").Process(
        target=lambda: list(encode_chunks(rows(5), encode, num_workers=1))
    )
    parent.start()
    assert read_when_ready(reading) == b"begun\n"
    parent.kill()
    assert read_when_ready(reading) == b""  # nobody has it open for writing any longer
    parent.join()
    os.close(reading)


def read_when_ready(descriptor):
    assert select.select([descriptor], [], [], 30)[0], "nothing came"
    return os.read(descriptor, 100)
