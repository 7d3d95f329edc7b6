"""Rows are tokenised once, found again by content, and counted."""

import json
import multiprocessing
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from finetune.config.sections.data import DataSection, TrainingSourceSection, ValidationSourceSection
from finetune.data import parallel
from finetune.data.cache import prepare_set
from finetune.data.sources import open_source
from finetune.errors import DataError

sys.path.append(str(Path(__file__).parent))  # handed on to spawned processes
from byte_encoding import encode_bytes

IDENTITY = {"tokenizer": "t1", "chat_template": "c1"}


def opened(section, say=lambda _: None, *, key="data.train"):
    return open_source(section, key=key, say=say)


class Prepare:
    """Prepare texts and remember what was said."""

    def __init__(self, write_rows, make_section):
        self.write_rows, self.make_section = write_rows, make_section
        self.said = []
        self.encoded = 0

    def __call__(self, texts, *, identity=IDENTITY, source=None, **keys):
        self.said.clear()
        self.encoded = 0
        written = self.write_rows([{"text": text} for text in texts], **(source or {}))
        section = self.make_section(written, **keys)
        source = opened(written, self.said.append)
        return prepare_set(source, self.encode, section=section, identity=identity, say=self.said.append)

    def encode(self, rows):
        self.encoded += len(rows)
        return encode_bytes(rows)


@pytest.fixture
def prepare(write_rows, make_section):
    return Prepare(write_rows, make_section)


def texts_of(prepared):
    return [bytes(sample.arrays["input_ids"].astype(np.uint8)).decode() for sample in prepared]


def test_samples_come_back_as_they_were_encoded(prepare):
    prepared = prepare(["a>b", "cc>dd"])
    assert texts_of(prepared) == ["a>b", "cc>dd"]
    second = prepared[1]
    assert second.sample_id == 1
    assert second.arrays["input_ids"].dtype == np.uint32
    assert second.arrays["is_target"].tolist() == [False, False, True, True, True]
    assert prepared.lengths.tolist() == [3, 5]
    assert prepared.num_targets_each.tolist() == [2, 3]
    with pytest.raises(IndexError):
        prepared[2]


def test_the_same_rows_are_tokenised_once(prepare):
    first = prepare(["a>b", "c>d"])
    assert prepare.encoded == 2
    again = prepare(["a>b", "c>d"])
    assert prepare.encoded == 0
    assert again.fingerprint == first.fingerprint
    assert again.counts == first.counts
    assert "data.train: 2 rows -> 2 samples" in prepare.said


CHANGES = {
    "template": {"identity": IDENTITY | {"chat_template": "c2"}},
    "max_length": {"max_length": 65},
    "over_length": {"over_length": "drop"},
    "no_target": {"no_target": "drop"},
    "system_prompt": {"system_prompt": "Be brief."},
    "skip": {"source": {"skip": 1}},
    "take": {"source": {"take": 1}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_the_samples_makes_a_new_set(prepare, change):
    first = prepare(["a>b", "c>d"])
    other = prepare(["a>b", "c>d"], **CHANGES[change])
    assert prepare.encoded > 0
    assert other.fingerprint != first.fingerprint


def test_changed_rows_make_a_new_set(prepare):
    first = prepare(["a>b"])
    assert prepare(["a>c"]).fingerprint != first.fingerprint


def test_what_does_not_change_the_samples_hits(prepare):
    first = prepare(["a>b"])
    assert (
        prepare(["a>b"], source={"name": "elsewhere.jsonl"}, num_workers=1, shuffle=False).fingerprint
        == first.fingerprint
    )
    assert prepare.encoded == 0


def test_long_rows_are_refused_with_the_numbers(prepare, tmp_path):
    with pytest.raises(DataError) as caught:
        prepare(["a>b", "a>bcdefg", "a>bcde", "ab"], max_length=5)
    first, second = str(caught.value).splitlines()
    assert first == (
        "data.train: 2 of 4 rows are longer than data.max_length: 5 (the longest has 8 tokens: "
        f"{tmp_path}/rows.jsonl, row 2). Set data.over_length: truncate or drop, or data.max_length: 8."
    )
    assert second.startswith("data.train: 1 of 4 rows have no target to learn from")
    assert "rows.jsonl, row 4" in second
    assert list((tmp_path / "cache" / "prepared").glob("[!.]*")) == []


def test_long_rows_are_cut_and_what_is_lost_is_counted(prepare):
    prepared = prepare(["a>b", "ab>cdef", "abcdefg>h"], max_length=5, over_length="truncate", no_target="drop")
    assert texts_of(prepared) == ["a>b", "ab>cd"]
    counts = prepared.counts
    assert (counts.rows, counts.samples, counts.tokens, counts.targets) == (3, 2, 8, 5)
    assert (counts.truncated_rows, counts.truncated_tokens, counts.truncated_targets) == (2, 6, 4)
    assert (counts.rows_without_target, counts.longest) == (1, 9)
    assert "data.train: truncated: 2 rows, 6 tokens cut off, 4 of them targets" in prepare.said
    assert "data.train: dropped without a target: 1 rows" in prepare.said
    assert "data.train: 8 tokens, of which 5 targets (62.5%)" in prepare.said


def test_long_rows_are_dropped_and_counted(prepare):
    prepared = prepare(["a>b", "ab>cdef"], max_length=5, over_length="drop")
    assert texts_of(prepared) == ["a>b"]
    assert "data.train: dropped as too long: 1 rows, 7 tokens left out, 5 of them targets" in prepare.said
    assert prepared.counts.longest == 7


def test_a_row_that_encodes_to_nothing_has_no_target(prepare):
    with pytest.raises(DataError, match=r"1 of 2 rows have no target.*row 2.*set data.no_target: drop"):
        prepare(["a>b", ""])
    assert texts_of(prepare(["a>b", ""], no_target="drop")) == ["a>b"]


def test_when_nothing_is_left_it_is_said(prepare):
    with pytest.raises(DataError, match=r"no sample is left: .*dropped without a target: 2 rows"):
        prepare(["a", ""], no_target="drop")


def test_a_row_that_cannot_be_encoded_is_named(prepare):
    with pytest.raises(DataError, match=r"rows\.jsonl, row 2: cannot be encoded"):
        prepare(["a>b", "poison"])


def test_the_validation_source_is_named_as_such(write_rows, make_section):
    train, validation = write_rows([{"text": "a>b"}]), write_rows([], name="none.jsonl")
    section = make_section(train, validation=ValidationSourceSection(path=validation.path))
    validation = section.validation
    with pytest.raises(DataError, match=r"data\.validation: .*none\.jsonl has no rows"):
        opened(validation, key="data.validation")


@pytest.fixture
def only_workers(monkeypatch):
    """Have nothing encoded in the main process, neither first nor while workers start."""
    monkeypatch.setattr(parallel, "CHUNKS_BEFORE_WORKERS", 0)
    monkeypatch.setattr(parallel, "_meanwhile", lambda chunks, recipe, starting: iter(()))


def test_several_processes_write_the_same_bytes(write_rows, make_section, tmp_path, monkeypatch, only_workers):
    monkeypatch.setattr(parallel, "ROWS_PER_CHUNK", 7)
    source = write_rows([{"text": "x" * (n % 13) + ">" + str(n)} for n in range(100)])
    sets = []
    for workers in (0, 2):
        section = make_section(source, prepare_workers=workers, cache_folder=str(tmp_path / f"cache{workers}"))
        sets.append(prepare_set(opened(source), encode_bytes, section=section, identity=IDENTITY, say=lambda _: None))
    files = [sorted(path.name for path in each.folder.iterdir()) for each in sets]
    assert files[0] == files[1]
    assert len(files[0]) == 9
    for name in files[0]:
        assert (sets[0].folder / name).read_bytes() == (sets[1].folder / name).read_bytes()


def test_a_row_that_a_worker_cannot_encode_is_named(write_rows, make_section, only_workers):
    source = write_rows([{"text": "a>b"}, {"text": "poison"}])
    section = make_section(source, prepare_workers=1)
    with pytest.raises(DataError, match=r"rows\.jsonl, row 2: cannot be encoded"):
        prepare_set(opened(source), encode_bytes, section=section, identity=IDENTITY, say=lambda _: None)


def test_a_prepared_set_travels_to_another_process_by_its_path(prepare):
    prepared = prepare(["a>b" * 20])
    sent = pickle.dumps(prepared)
    assert len(sent) < 500
    assert texts_of(pickle.loads(sent)) == ["a>b" * 20]


def test_a_chunk_in_which_nothing_is_kept_does_no_harm(prepare, monkeypatch):
    monkeypatch.setattr(parallel, "ROWS_PER_CHUNK", 1)
    assert texts_of(prepare(["", "a>b", "", "c>d", ""], no_target="drop")) == ["a>b", "c>d"]


@pytest.mark.parametrize("name", ["input_ids.values.npy", "is_target.offsets.npy", "num_targets.npy", "counts.json"])
def test_a_damaged_set_is_refused_with_the_remedy(prepare, name):
    folder = prepare(["a>b", "c>d"]).folder
    file = folder / name
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"is damaged or not ours: .*Delete that folder"):
        prepare(["a>b", "c>d"])


def test_a_foreign_set_is_refused(prepare):
    folder = prepare(["a>b"]).folder
    manifest = json.loads((folder / "counts.json").read_text())
    (folder / "counts.json").write_text(json.dumps(manifest | {"fingerprint": "other"}))
    with pytest.raises(DataError, match="was made of something else"):
        prepare(["a>b"])


def test_a_folder_that_cannot_be_written_is_named(prepare, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"data\.cache_folder: .*cannot be written"):
        prepare(["a>b"], cache_folder=str(tmp_path / "file"))


def _prepare_in_a_process(path, cache, log, barrier, done):
    def encode(rows):
        with Path(log).open("a") as file:
            file.write("encoded\n" * len(rows))
        return encode_bytes(rows)

    source = TrainingSourceSection(path=path)
    section = DataSection(train=source, max_length=64, cache_folder=cache)
    barrier.wait()
    prepared = prepare_set(opened(source), encode, section=section, identity=IDENTITY, say=lambda _: None)
    done.put((prepared.fingerprint, texts_of(prepared)))


def test_two_processes_at_once_do_it_once(write_rows, tmp_path):
    fork = multiprocessing.get_context("fork")
    source = write_rows([{"text": f"{n}>x"} for n in range(50)])
    barrier, done = fork.Barrier(2), fork.Queue()
    arguments = (source.path, str(tmp_path / "cache"), str(tmp_path / "log"), barrier, done)
    processes = [fork.Process(target=_prepare_in_a_process, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    results = [done.get(timeout=30) for _ in processes]
    for process in processes:
        process.join(timeout=30)
    assert results[0] == results[1]
    assert results[0][1] == [f"{n}>x" for n in range(50)]
    assert len((tmp_path / "log").read_text().splitlines()) == 50
