"""An interrupted build resumes where it stopped, and its result is bitwise identical."""

import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from finetune.data.sources.source import open_source
from finetune.data.token_cache import cache, chunks
from finetune.data.token_cache.cache import build_set, num_written_rows
from finetune.data.token_cache.chunks import EncoderPool, Encoding
from finetune.data.token_cache.samples import chunk_name
from finetune.data.token_cache.store import Identity, TokenCache
from finetune.errors import DataError
from finetune.runtime.supervision.heartbeat import VARIABLE
from tests.data.byte_encoding import encode_bytes
from tests.refusals import refused

NUM_ROWS = 53
MADE_OF = Identity("f1", {})


class Build:
    """Builds a set of a few rows in small chunks, two of which fill a file: 10 rows."""

    def __init__(self, source, section):
        self.source, self.section = source, section
        self.encoded, self.progress, self.damage = 0, [], []

    def __call__(self, folder, *, made_of=MADE_OF):
        self.encoded, self.progress, self.damage = 0, [], []
        folder.mkdir(exist_ok=True)
        plan = Encoding(self.encode, self.section, identity={}, format=self.source.format)
        rows = self.source.rows()
        return build_set(
            folder,
            rows,
            EncoderPool(plan, num_workers=0),
            made_of,
            advance=self.progress.append,
            on_damage=lambda *damage: self.damage.append(damage),
        )

    def encode(self, rows):
        self.encoded += len(rows)
        return encode_bytes(rows)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "ROWS_PER_CHUNK", 5)
    monkeypatch.setattr(cache, "CHUNKS_PER_FILE", 2)


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


KILLED = {  # where, and how many rows had been written by then
    "before anything is written": ("prepare.write step=1", 0),
    "before the first file": ("prepare.write step=2", 0),
    "after a file": ("prepare.saved step=3", 30),
    "with rows that are not written yet": ("prepare.write step=8", 30),
    "when all rows are encoded": ("prepare.finish", 50),
}


@pytest.mark.parametrize("where", KILLED)
def test_a_killed_build_resumes_and_its_result_is_bitwise_identical(build_here, tmp_path, monkeypatch, where):
    fault, num_written = KILLED[where]
    whole, cut_off = tmp_path / "whole", tmp_path / "cut_off"
    counts = build_here(whole)
    assert in_a_process(monkeypatch, f"{fault} do=kill", lambda: build_here(cut_off)) == -signal.SIGKILL
    assert num_written_rows(cut_off) == num_written
    assert build_here(cut_off) == counts
    assert build_here.encoded == NUM_ROWS - num_written
    assert build_here.progress[0] == num_written
    assert build_here.progress[-1] == NUM_ROWS
    assert content_of(cut_off) == content_of(whole)
    assert len(content_of(whole)) == 8  # six chunks, the columns and the manifest


def cut_off_after(num_rows, folder, build_here, monkeypatch):
    monkeypatch.setenv(VARIABLE, f"prepare.saved step={num_rows // 10} do=raise")
    with pytest.raises(RuntimeError):
        build_here(folder)
    monkeypatch.delenv(VARIABLE)
    assert num_written_rows(folder) == num_rows


def flip_first_byte(path):
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])


DAMAGE = {  # and the reason that is given
    "cut off": (lambda path: os.truncate(path, path.stat().st_size - 5), "cannot be read: its footer is damaged"),
    "empty": (lambda path: os.truncate(path, 0), "cannot be read: its footer is damaged"),
    "missing": (Path.unlink, "is missing"),
    "a flipped bit": (flip_first_byte, "has changed between bytes 0 and"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_rows_from_the_first_damaged_file_on_are_encoded_again(build_here, tmp_path, monkeypatch, what):
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    build_here(whole)
    cut_off_after(30, damaged, build_here, monkeypatch)
    damage, reason = DAMAGE[what]
    damage(damaged / chunk_name(1))
    build_here(damaged)
    assert build_here.encoded == NUM_ROWS - 10
    ((given, first_row),) = build_here.damage
    assert first_row == 11
    assert given.startswith(f"{chunk_name(1)} {reason}")
    assert content_of(damaged) == content_of(whole)


def test_a_file_is_written_when_its_samples_have_enough_bytes(build_here, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "CHUNK_BYTES", 1)
    build_here(tmp_path / "set")
    assert len(list((tmp_path / "set").glob("chunk-*"))) == 11


def test_files_of_another_identity_are_not_resumed_from(build_here, tmp_path, monkeypatch):
    cut_off_after(30, tmp_path / "set", build_here, monkeypatch)
    build_here(tmp_path / "set", made_of=Identity("f2", {}))
    assert build_here.encoded == NUM_ROWS
    assert TokenCache(tmp_path / "set").fingerprint == "f2"


def test_a_source_with_fewer_rows_than_were_tokenized_is_refused(build_here, tmp_path, monkeypatch):
    cut_off_after(30, tmp_path / "set", build_here, monkeypatch)
    monkeypatch.setattr(build_here.source, "rows", lambda: iter(()))
    with refused(DataError, "30 rows"):
        build_here(tmp_path / "set")


def test_a_set_without_a_sample_can_be_opened(write_rows, make_section, tmp_path):
    source = write_rows([{"text": ""}], format="text")
    section = make_section(source, no_target="drop")
    counts = Build(open_source(source, key="data.train", log=print), section)(tmp_path / "set")
    prepared = TokenCache(tmp_path / "set")
    assert len(prepared) == counts.samples == 0
    assert (counts.rows_without_target, counts.empty_rows) == (1, 1)
    assert prepared.lengths_of(np.zeros(0, np.int64)).tolist() == []
