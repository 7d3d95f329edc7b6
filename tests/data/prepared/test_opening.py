"""A set that is damaged on the disk is never used: it is set aside, made again and told of."""

import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from finetune.data.prepared import build, opening, parallel
from finetune.data.prepared.cache import prepare_set
from finetune.data.prepared.journal import NAME as JOURNAL
from finetune.data.prepared.opening import mend
from finetune.data.sources.source import open_source
from finetune.data.verified import blocks
from finetune.data.verified.damage import DamagedSet
from finetune.errors import DataError
from finetune.runtime.faults import VARIABLE
from tests.data.byte_encoding import encode_bytes

TEXTS = [f"{'question ' * (number % 5 + 1)}{number}>answer {number}" for number in range(40)]


class Prepare:
    """Prepares the same texts again and again, as ranks and later runs do."""

    def __init__(self, write_rows, make_section):
        source = write_rows([{"text": text} for text in TEXTS])
        self.source, self.section = source, make_section(source)
        self.said, self.encoded = [], 0

    def __call__(self):
        self.said.clear()
        self.encoded = 0
        opened = open_source(self.source, key="data.train", say=self.said.append)
        return prepare_set(opened, self.encode, section=self.section, identity={}, say=self.said.append)

    def encode(self, rows):
        self.encoded += len(rows)
        return encode_bytes(rows)

    @property
    def warnings(self):
        return [line for line in self.said if line.startswith("warning")]


@pytest.fixture
def prepare(write_rows, make_section):
    return Prepare(write_rows, make_section)


@pytest.fixture
def beside(monkeypatch):
    """No set is small: all are verified in the background."""
    monkeypatch.setattr(opening, "VERIFIED_AT_ONCE_BYTES", -1)


def texts_of(prepared):
    return [bytes(sample.arrays["input_ids"].astype(np.uint8)).decode() for sample in prepared]


def flip(path, *, every=40, start=128):
    content = bytearray(path.read_bytes())
    for place in range(start, len(content), every):
        content[place] ^= 1
    with path.open("r+b") as file:
        file.write(content)


def aside(prepared):
    return sorted(path for path in prepared.folder.parent.iterdir() if path.name.startswith(".damaged-"))


def as_folder(path):
    path.unlink()
    path.mkdir()


def as_link(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def as_pipe(path):
    path.unlink()
    os.mkfifo(path)


def as_other_manifest(path):
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fingerprint": "other"}))


DAMAGE = {
    "bits of the tokens": ("input_ids.values.npy", flip),
    "bits of the targets": ("is_target.values.npy", flip),
    "offsets": ("input_ids.offsets.npy", flip),
    "lengths": ("lengths.npy", flip),
    "counts of targets": ("num_targets.npy", flip),
    "digests": ("digests.npy", flip),
    "marks": ("marks.npy", flip),
    "row numbers": ("row_numbers.npy", flip),
    "a header": ("lengths.npy", lambda path: flip(path, every=9, start=0)),
    "the manifest": ("counts.json", lambda path: flip(path, start=30)),
    "another manifest": ("counts.json", as_other_manifest),
    "nesting": ("counts.json", lambda path: path.write_text("[" * 100_000)),
    "cut off": ("input_ids.values.npy", lambda path: os.truncate(path, path.stat().st_size - 9)),
    "longer": ("input_ids.values.npy", lambda path: os.truncate(path, path.stat().st_size + 8)),
    "empty": ("is_target.values.npy", lambda path: os.truncate(path, 0)),
    "missing": ("is_target.offsets.npy", Path.unlink),
    "no manifest": ("counts.json", Path.unlink),
    "a folder for a file": ("input_ids.values.npy", as_folder),
    "a link to a device": ("input_ids.values.npy", as_link),
    "a pipe": ("counts.json", as_pipe),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found_before_the_set_is_used_and_the_set_is_made_again(prepare, what):
    before = prepare()
    name, damage = DAMAGE[what]
    damage(before.folder / name)
    after = prepare()
    assert texts_of(after) == TEXTS
    assert prepare.encoded == len(TEXTS)
    assert after.folder == before.folder
    assert len(aside(after)) == 1
    assert any("is damaged: " in line and "made again" in line for line in prepare.warnings)
    prepare()
    assert prepare.encoded == 0
    assert [str(aside(after)[0]) in line for line in prepare.warnings] == [True], "it is told of until it is deleted"


@pytest.mark.parametrize("place", ["a file", "a link to nowhere", "a link to another set"])
def test_something_else_in_the_place_of_the_set_is_set_aside(prepare, tmp_path, place):
    folder = prepare().folder
    shutil.rmtree(folder)
    if place == "a file":
        folder.write_text("")
    else:
        folder.symlink_to(tmp_path if place == "a link to another set" else tmp_path / "nowhere")
    made = prepare()
    assert texts_of(made) == TEXTS
    assert made.folder.is_dir()
    assert not made.folder.is_symlink()
    assert len(aside(made)) == 1


def test_what_cannot_be_set_aside_is_one_message(prepare, monkeypatch):
    flip(prepare().folder / "lengths.npy")

    def refuse(path, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(
        DataError, match=r"is damaged and cannot be set aside: Permission denied\. Set data\.cache_folder"
    ):
        prepare()


def test_a_disk_that_damages_every_copy_is_told_of(prepare, monkeypatch):
    prepare()
    monkeypatch.setattr(opening, "_opened", lambda folder, made_of: (_ for _ in ()).throw(DamagedSet(folder, "rot")))
    with pytest.raises(DataError, match="and so were those that were made in its place"):
        prepare()


def test_damage_that_is_found_in_the_background_is_mended_in_the_set_at_hand(prepare, beside):
    flip(prepare().folder / "input_ids.values.npy")
    prepared = prepare()
    mend(prepared, seconds=None)
    assert texts_of(prepared) == TEXTS
    assert len(aside(prepared)) == 1
    mend(prepared, seconds=None)
    assert texts_of(prepared) == TEXTS


def test_a_rank_with_the_old_files_open_takes_over_what_another_has_made(prepare, beside):
    flip(prepare().folder / "input_ids.values.npy")
    ranks = [prepare() for _ in range(3)]
    encoded = []
    for rank in ranks:
        prepare.encoded = 0
        mend(rank, seconds=None)
        encoded.append(prepare.encoded)
        assert texts_of(rank) == TEXTS
    assert encoded == [len(TEXTS), 0, 0], "one makes it again"
    assert len(aside(ranks[0])) == 1


def test_a_sample_that_is_read_alone_is_compared_with_its_mark(prepare):
    prepared = prepare()
    assert bytes(prepared.intact(3).arrays["input_ids"].astype(np.uint8)).decode() == TEXTS[3]
    flip(prepared.folder / "input_ids.values.npy", every=4)  # the pages are shared: it is damaged in the map, too
    with pytest.raises(DamagedSet, match=r"rows\.jsonl, row 4 is not what was prepared"):
        prepared.intact(3)


def test_a_copy_in_another_process_reads_the_files_and_not_their_digests(prepare, monkeypatch):
    sent = pickle.dumps(prepare())
    monkeypatch.setattr(blocks.xxhash, "xxh3_128", None)  # would be needed to verify
    copy = pickle.loads(sent)
    assert texts_of(copy) == TEXTS


@pytest.mark.parametrize("damage", ["values", "offsets", "journal", "journal twice"])
def test_damage_before_a_killed_build_goes_on_is_not_sealed(prepare, monkeypatch, damage):
    monkeypatch.setattr(parallel, "ROWS_PER_CHUNK", 5)
    monkeypatch.setattr(build, "CHUNKS_BETWEEN_NOTES", 2)
    monkeypatch.setenv(VARIABLE, "prepare.noted step=2 do=raise")
    with pytest.raises(RuntimeError):
        prepare()
    monkeypatch.delenv(VARIABLE)
    (staging,) = Path(prepare.section.cache_folder).glob("prepared/.*.making")
    if damage == "journal twice":
        (staging / JOURNAL).write_bytes(2 * (staging / JOURNAL).read_bytes())
    else:
        name = JOURNAL if damage == "journal" else f"input_ids.{damage}.npy"
        flip(staging / name, every=10**9, start=140)  # one bit; in the journal, of its first line
    made = prepare()
    assert texts_of(made) == TEXTS
    assert prepare.encoded == (len(TEXTS) - 20 if damage == "journal twice" else len(TEXTS))
    assert any("made again from the first row" in line for line in prepare.warnings) == ("journal" not in damage)
    made.verify()


@pytest.mark.parametrize("name", ["lengths.npy", JOURNAL])
def test_a_link_in_a_build_that_was_begun_is_not_written_through(prepare, monkeypatch, tmp_path, name):
    monkeypatch.setattr(parallel, "ROWS_PER_CHUNK", 5)
    monkeypatch.setattr(build, "CHUNKS_BETWEEN_NOTES", 2)
    monkeypatch.setenv(VARIABLE, "prepare.noted step=2 do=raise")
    with pytest.raises(RuntimeError):
        prepare()
    monkeypatch.delenv(VARIABLE)
    (staging,) = Path(prepare.section.cache_folder).glob("prepared/.*.making")
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (staging / name).unlink()
    (staging / name).symlink_to(precious)
    assert texts_of(prepare()) == TEXTS
    assert precious.read_text() == "mine"
    assert "is no file of its own" in prepare.warnings[0]
