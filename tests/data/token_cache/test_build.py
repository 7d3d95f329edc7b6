"""A set that is cut off goes on where it stopped, and comes out the same to the bit."""

import errno
import multiprocessing
import os
import signal

import numpy as np
import pytest

from finetune.data.sources.source import open_source
from finetune.data.token_cache import build, encoder_pool
from finetune.data.token_cache.build import build_set
from finetune.data.token_cache.chunks import make_encoding_plan
from finetune.data.token_cache.encoder_pool import EncoderPool
from finetune.data.token_cache.journal import NAME, num_journaled_rows
from finetune.data.token_cache.store import Identity, TokenCache
from finetune.errors import DataError
from finetune.runtime.supervision.faults import VARIABLE
from tests.data.byte_encoding import encode_bytes

NUM_ROWS = 53
MADE_OF = Identity("f1", {})


class Build:
    """Builds a set of a few rows in small chunks, with a journal line after every second one: 10 rows."""

    def __init__(self, source, section):
        self.source, self.section = source, section
        self.encoded, self.told = 0, []

    def __call__(self, folder, *, made_of=MADE_OF):
        self.encoded, self.told = 0, []
        folder.mkdir(exist_ok=True)
        recipe = make_encoding_plan(self.source.format, self.encode, section=self.section)
        rows = self.source.rows()
        return build_set(folder, rows, EncoderPool(recipe, num_workers=0), made_of, advance=self.told.append)

    def encode(self, rows):
        self.encoded += len(rows)
        return encode_bytes(rows)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(encoder_pool, "ROWS_PER_CHUNK", 5)
    monkeypatch.setattr(build, "CHUNKS_BETWEEN_NOTES", 2)


@pytest.fixture
def build_here(write_rows, make_section, small_chunks):
    source = write_rows([{"text": "x" * (n % 13) + ">" + str(n)} for n in range(NUM_ROWS)], format="text")
    section = make_section(source, max_length=12, over_length="truncate")
    return Build(open_source(source, key="data.train", log=print), section)


def content_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def in_a_process(monkeypatch, fault, call):
    """Call it in a forked process in which the fault strikes, and return its exit code."""
    monkeypatch.setenv(VARIABLE, fault)
    process = multiprocessing.get_context("fork").Process(target=call)
    process.start()
    process.join(timeout=30)
    monkeypatch.delenv(VARIABLE)
    return process.exitcode


KILLED = {  # where, and how many rows had been noted by then
    "before anything is written": ("prepare.write step=1", 0),
    "before the first line of the journal": ("prepare.write step=2", 0),
    "behind a line": ("prepare.noted step=3", 30),
    "with rows written and not noted": ("prepare.write step=8", 30),
    "when all rows are written": ("prepare.finish", 50),
}


@pytest.mark.parametrize("where", KILLED)
def test_a_killed_build_goes_on_and_the_bits_are_the_same(build_here, tmp_path, monkeypatch, where):
    fault, num_noted = KILLED[where]
    whole, cut_off = tmp_path / "whole", tmp_path / "cut_off"
    counts = build_here(whole)
    assert in_a_process(monkeypatch, f"{fault} do=kill", lambda: build_here(cut_off)) == -signal.SIGKILL
    assert num_journaled_rows(cut_off) == num_noted
    assert build_here(cut_off) == counts
    assert build_here.encoded == NUM_ROWS - num_noted
    assert build_here.told[0] == num_noted
    assert build_here.told[-1] == NUM_ROWS
    assert content_of(cut_off) == content_of(whole)
    assert len(content_of(whole)) == 10


def test_a_build_may_be_killed_again_and_again(build_here, tmp_path, monkeypatch):
    whole, cut_off = tmp_path / "whole", tmp_path / "cut_off"
    build_here(whole)
    noted = []
    while in_a_process(monkeypatch, "prepare.noted do=kill", lambda: build_here(cut_off)) != 0:
        noted.append(num_journaled_rows(cut_off))
    assert noted == [10, 20, 30, 40, 50]
    assert content_of(cut_off) == content_of(whole)


def test_a_whole_set_is_not_made_again(build_here, tmp_path):
    counts = build_here(tmp_path / "set")
    assert build_here(tmp_path / "set") == counts
    assert build_here.encoded == 0


def test_a_full_disk_leaves_what_was_noted_to_go_on_from(build_here, tmp_path, monkeypatch):
    whole, full = tmp_path / "whole", tmp_path / "full"
    build_here(whole)
    monkeypatch.setenv(VARIABLE, "prepare.write step=6 do=no_space")
    with pytest.raises(OSError) as caught:
        build_here(full)
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.delenv(VARIABLE)
    build_here(full)
    assert build_here.encoded == NUM_ROWS - 20
    assert content_of(full) == content_of(whole)


def cut_off_after(num_rows, folder, build_here, monkeypatch):
    monkeypatch.setenv(VARIABLE, f"prepare.noted step={num_rows // 10} do=raise")
    with pytest.raises(RuntimeError):
        build_here(folder)
    monkeypatch.delenv(VARIABLE)
    assert num_journaled_rows(folder) == num_rows


def test_a_torn_line_of_the_journal_is_as_if_it_had_never_been(build_here, tmp_path, monkeypatch):
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    build_here(whole)
    cut_off_after(30, torn, build_here, monkeypatch)
    os.truncate(torn / NAME, (torn / NAME).stat().st_size - 5)
    assert num_journaled_rows(torn) == 20
    build_here(torn)
    assert build_here.encoded == NUM_ROWS - 20
    assert content_of(torn) == content_of(whole)


@pytest.mark.parametrize("damage", ["shorter", "gone"])
def test_files_that_are_not_as_they_were_left_are_begun_anew(build_here, tmp_path, monkeypatch, damage):
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    build_here(whole)
    cut_off_after(30, damaged, build_here, monkeypatch)
    file = damaged / "input_ids.values.npy"
    os.truncate(file, 150) if damage == "shorter" else file.unlink()
    build_here(damaged)
    assert build_here.encoded == NUM_ROWS
    assert content_of(damaged) == content_of(whole)


def test_what_was_begun_of_something_else_is_begun_anew(build_here, tmp_path, monkeypatch):
    cut_off_after(30, tmp_path / "set", build_here, monkeypatch)
    build_here(tmp_path / "set", made_of=Identity("f2", {}))
    assert build_here.encoded == NUM_ROWS
    assert TokenCache(tmp_path / "set").fingerprint == "f2"


def test_rows_that_have_become_fewer_are_told(build_here, tmp_path, monkeypatch):
    cut_off_after(30, tmp_path / "set", build_here, monkeypatch)
    monkeypatch.setattr(build_here.source, "rows", lambda: iter(()))
    with pytest.raises(DataError, match="fewer rows than the 30 that were already tokenised"):
        build_here(tmp_path / "set")


def test_a_sample_knows_where_its_row_stands(build_here, tmp_path):
    folder = tmp_path / "set"
    build_here(folder)
    prepared = TokenCache(folder)
    file = build_here.source.section.path
    assert prepared.place(0) == f"{file}, row 1"
    assert prepared.place(len(prepared) - 1) == f"{file}, row {NUM_ROWS}"
    assert len(prepared) < NUM_ROWS  # some rows have lost all of their targets


def test_a_set_without_a_sample_can_be_opened(write_rows, make_section, tmp_path):
    source = write_rows([{"text": ""}], format="text")
    section = make_section(source, no_target="drop")
    counts = Build(open_source(source, key="data.train", log=print), section)(tmp_path / "set")
    prepared = TokenCache(tmp_path / "set")
    assert len(prepared) == counts.samples == 0
    assert (counts.rows_without_target, counts.empty_rows) == (1, 1)
    assert prepared.lengths_of(np.zeros(0, np.int64)).tolist() == []
