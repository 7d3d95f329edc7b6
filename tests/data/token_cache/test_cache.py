"""A set that is damaged on disk is never used: it is quarantined, rebuilt and reported."""

import json
import multiprocessing
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from finetune.config.sections.data import DataSection, ValidationSourceSection
from finetune.data.sources.source import open_source, open_sources
from finetune.data.token_cache import cache, chunks, samples
from finetune.data.token_cache.cache import prepare_set
from finetune.data.token_cache.chunks import Encoding
from finetune.data.token_cache.integrity import DamagedSet
from finetune.data.token_cache.samples import SAMPLES_FILE, chunk_name, write_array_file
from finetune.data.token_cache.store import CACHE_VERSION
from finetune.errors import DataError
from finetune.runtime.supervision.heartbeat import VARIABLE
from tests.data.byte_encoding import encode_bytes, flip
from tests.refusals import refused

TEXTS = [f"{'question ' * (number % 5 + 1)}{number}>answer {number}" for number in range(40)]


IDENTITY = {"tokenizer": "t1", "chat_template": "c1"}


def prepared_of(source, encoding, *, log=lambda _: None, **keys):
    return prepare_set(open_source(source, key="data.train", log=log), encoding, log=log, **keys)


class Prepare:
    """Prepare texts and remember what was said."""

    def __init__(self, write_rows, make_section):
        self.write_rows, self.make_section = write_rows, make_section
        self.said = []
        self.encoded = 0

    def __call__(self, texts=TEXTS, *, identity=IDENTITY, source=None, remedies=("drop",), **keys):
        self.said.clear()
        self.encoded = 0
        written = self.write_rows([{"text": text} for text in texts], **(source or {}))
        self.section = self.make_section(written, **keys)
        encoding = Encoding(self.encode, self.section, identity=identity, over_length=remedies)
        return prepared_of(written, encoding, log=self.said.append)

    def encode(self, rows):
        self.encoded += len(rows)
        return encode_bytes(rows)

    @property
    def warnings(self):
        return [line for line in self.said if line.startswith("warning")]


@pytest.fixture
def prepare(write_rows, make_section):
    return Prepare(write_rows, make_section)


def texts_of(prepared):
    return [bytes(sample.arrays["input_ids"].astype(np.uint8)).decode() for sample in prepared]


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


def as_other_columns(path):
    write_array_file(path, {"lengths": (np.dtype(np.int32), [np.ones(40, np.int32)])}, metadata={})


CHUNK = chunk_name(0)

DAMAGE = {
    "bits of the samples": (CHUNK, flip),
    "one bit of a token": (CHUNK, lambda path: flip(path, every=10**9, start=0)),
    "bits of the columns": (SAMPLES_FILE, flip),
    "one bit of a length": (SAMPLES_FILE, lambda path: flip(path, every=10**9, start=0)),
    "the footer of the columns": (SAMPLES_FILE, lambda path: flip(path, start=path.stat().st_size - 60)),
    "the footer of the samples": (CHUNK, lambda path: flip(path, start=path.stat().st_size - 60)),
    "the length of a footer": (CHUNK, lambda path: flip(path, start=path.stat().st_size - 3)),
    "the columns of another set": (SAMPLES_FILE, as_other_columns),
    "the manifest": ("counts.json", lambda path: flip(path, start=30)),
    "another manifest": ("counts.json", as_other_manifest),
    "nesting": ("counts.json", lambda path: path.write_text("[" * 100_000)),
    "cut off": (CHUNK, lambda path: os.truncate(path, path.stat().st_size - 9)),
    "longer": (CHUNK, lambda path: os.truncate(path, path.stat().st_size + 8)),
    "empty": (CHUNK, lambda path: os.truncate(path, 0)),
    "missing": (CHUNK, Path.unlink),
    "no manifest": ("counts.json", Path.unlink),
    "a folder for a file": (CHUNK, as_folder),
    "a link to a device": (CHUNK, as_link),
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
    assert any("is damaged: " in line and "rebuilt" in line for line in prepare.warnings)
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


def test_a_damaged_cache_that_cannot_be_set_aside_is_one_message(prepare, monkeypatch):
    flip(prepare().folder / SAMPLES_FILE)

    def refuse(path, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    with refused(DataError, "data.cache_folder"):
        prepare()


def test_a_sample_that_is_read_alone_is_compared_with_its_mark(prepare):
    prepared = prepare()
    assert bytes(prepared.intact(3).arrays["input_ids"].astype(np.uint8)).decode() == TEXTS[3]
    flip(prepared.folder / CHUNK, every=4, start=0)  # the pages are shared: it is damaged in the map, too
    with refused(DamagedSet, "rows.jsonl, row 4"):
        prepared.intact(3)


def test_a_copy_in_another_process_reads_the_files_and_not_their_digests(prepare, monkeypatch):
    sent = pickle.dumps(prepare())
    assert len(sent) < 600
    monkeypatch.setattr(samples.ArrayFile, "verify", None)  # would be needed to verify
    copy = pickle.loads(sent)
    assert texts_of(copy) == TEXTS


def test_a_set_of_an_older_version_is_prepared_again_with_one_line(prepare):
    folder = prepare().folder
    folder.rename(folder.with_name(folder.name.rpartition("-")[0] + f"-{CACHE_VERSION - 1}"))
    assert texts_of(prepare()) == TEXTS
    assert prepare.encoded == len(TEXTS)
    older = f"{folder.parent}/[!.]*-[2-{CACHE_VERSION - 1}]"
    (line,) = [line for line in prepare.said if older in line]
    assert line.startswith(f"data.train: rows are prepared as {folder}; ")
    prepare()
    assert not any(older in line for line in prepare.said)


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


def test_the_same_rows_are_tokenized_once(prepare):
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
    "train_on": {"train_on": "all"},
    "truncate_side": {"truncate_side": "start"},
    "skip": {"source": {"skip": 1}},
    "take": {"source": {"take": 1}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_setting_that_changes_samples_makes_a_new_cache(prepare, change):
    first = prepare(["a>b", "c>d"])
    other = prepare(["a>b", "c>d"], **CHANGES[change])
    assert prepare.encoded > 0
    assert other.fingerprint != first.fingerprint


def test_settings_that_do_not_change_samples_reuse_the_cache(prepare):
    first = prepare(["a>b"])
    assert (
        prepare(["a>b"], source={"name": "elsewhere.jsonl"}, num_workers=1, shuffle=False).fingerprint
        == first.fingerprint
    )
    assert prepare.encoded == 0


def test_long_rows_are_refused_with_the_numbers(prepare, tmp_path):
    with refused(DataError, "2 of 4 rows", "row 2", "data.max_length: 8", "1 of 4 rows", "row 4"):
        prepare(["a>b", "a>bcdefg", "a>bcde", "ab"], max_length=5)
    assert list((tmp_path / "cache" / "prepared").glob("[!.]*")) == []


def test_long_rows_are_refused_with_the_remedies_that_the_task_allows(prepare):
    for remedies in (("truncate", "split", "drop"), ("drop",)):
        with refused(DataError, *remedies, "data.max_length: 8"):
            prepare(["a>b", "a>bcdefg"], max_length=5, remedies=remedies)


def test_long_rows_are_truncated_and_lost_tokens_are_counted(prepare):
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
    assert "data.train: dropped as too long: 1 rows, 7 tokens dropped, 5 of them targets" in prepare.said
    assert prepared.counts.longest == 7


def test_a_row_that_encodes_to_nothing_has_no_target(prepare):
    with refused(DataError, "1 of 2 rows", "row 2", "data.no_target"):
        prepare(["a>b", ""])
    assert texts_of(prepare(["a>b", ""], no_target="drop")) == ["a>b"]


def test_a_source_without_any_remaining_sample_is_an_error(prepare):
    with refused(DataError, "2 rows"):
        prepare(["a", ""], no_target="drop")


def test_the_validation_source_is_named_as_such(write_rows, make_section):
    train, validation = write_rows([{"text": "a>b"}]), write_rows([], name="none.jsonl")
    section = make_section(train, validation=ValidationSourceSection(path=validation.path))
    validation = section.validation
    with refused(DataError, "data.validation", "none.jsonl"):
        open_source(validation, key="data.validation", log=print)


def test_several_processes_write_the_same_bytes(write_rows, make_section, tmp_path, monkeypatch, only_workers):
    monkeypatch.setattr(chunks, "ROWS_PER_CHUNK", 7)
    source = write_rows([{"text": "x" * (n % 13) + ">" + str(n)} for n in range(100)])
    sets = []
    for workers in (0, 2):
        section = make_section(source, prepare_workers=workers, cache_folder=str(tmp_path / f"cache{workers}"))
        sets.append(prepared_of(source, Encoding(encode_bytes, section, identity=IDENTITY)))
    files = [sorted(path.name for path in prepared.folder.iterdir()) for prepared in sets]
    assert files[0] == files[1]
    assert files[0] == [CHUNK, "counts.json", SAMPLES_FILE]
    for name in files[0]:
        assert (sets[0].folder / name).read_bytes() == (sets[1].folder / name).read_bytes()


def test_a_row_that_a_worker_cannot_encode_is_named(write_rows, make_section, only_workers):
    source = write_rows([{"text": "a>b"}, {"text": "poison"}])
    section = make_section(source, prepare_workers=1)
    with refused(DataError, "rows.jsonl, row 2"):
        prepared_of(source, Encoding(encode_bytes, section, identity=IDENTITY))


def test_a_folder_that_cannot_be_written_is_named(prepare, tmp_path):
    (tmp_path / "file").write_text("")
    with refused(DataError, "data.cache_folder"):
        prepare(["a>b"], cache_folder=str(tmp_path / "file"))


def test_a_full_disk_is_one_message_and_the_next_start_resumes(prepare, monkeypatch, tmp_path):
    monkeypatch.setattr(chunks, "ROWS_PER_CHUNK", 1)
    monkeypatch.setattr(cache, "CHUNKS_PER_FILE", 2)
    monkeypatch.setenv(VARIABLE, "prepare.write step=4 do=no_space")
    texts = ["a>b", "c>d", "e>f", "g>h"]
    with refused(DataError):
        prepare(texts)
    monkeypatch.delenv(VARIABLE)
    assert texts_of(prepare(texts)) == texts
    assert prepare.encoded == 2
    assert "data.train: 2 rows are already tokenized; resuming from there" in prepare.said


def test_a_share_above_its_limit_stops_before_training_and_keeps_the_set(prepare):
    texts = ["a>b", "a>bcdefgh", "c>d", "e>f"]
    keys = {"max_length": 5, "over_length": "truncate"}
    with refused(DataError, "data.train: 1 of 4 rows", "max_truncated_rows", "20"):
        prepare(texts, audit={"max_truncated_rows": 0.2}, **keys)
    prepare(texts, audit={"max_truncated_rows": 0.25}, **keys)
    assert prepare.encoded == 0


def test_the_progress_callback_gets_rows_done_and_total(prepare, write_rows, make_section, monkeypatch):
    monkeypatch.setattr(chunks, "ROWS_PER_CHUNK", 2)
    source = write_rows([{"text": "a>b"}] * 5, format="text")
    told = []
    encoding = Encoding(encode_bytes, make_section(source), identity=IDENTITY)
    prepared_of(source, encoding, on_progress=lambda *seen: told.append(seen))
    assert told == [("data.train", rows, 5) for rows in (0, 2, 4, 5)]


class Processes:
    """Forked processes that prepare the same 50 rows in chunks of 5."""

    def __init__(self, source, tmp_path):
        self.source, self.tmp_path = source, tmp_path
        self.fork = multiprocessing.get_context("fork")
        self.barrier, self.done = self.fork.Barrier(2), self.fork.Queue()

    def start(self, name, *, fault="", begins=None, waits=None):
        process = self.fork.Process(target=self._prepare, args=(name, fault, begins, waits))
        process.start()
        return process

    def encoded(self):
        return (self.tmp_path / "log").read_text().split()

    def _prepare(self, name, fault, begins, waits):
        os.environ[VARIABLE] = fault

        def encode(rows):
            if begins is not None:
                begins.set()
            with (self.tmp_path / "log").open("a") as file:
                file.write(f"{name}\n" * len(rows))
            return encode_bytes(rows)

        def say(line):
            if waits is not None and line.startswith("waiting"):
                waits.set()

        section = DataSection(train=self.source, max_length=64, cache_folder=str(self.tmp_path / "cache"))
        prepared = prepared_of(self.source, Encoding(encode, section, identity=IDENTITY), log=say)
        self.done.put((name, prepared.fingerprint, texts_of(prepared)))


@pytest.fixture
def processes(write_rows, tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "ROWS_PER_CHUNK", 5)
    monkeypatch.setattr(cache, "CHUNKS_PER_FILE", 2)
    return Processes(write_rows([{"text": f"{n}>x"} for n in range(50)], format="text"), tmp_path)


def test_two_concurrent_processes_prepare_the_cache_once(processes):
    started = [processes.start(name) for name in ("one", "other")]
    results = [processes.done.get(timeout=30) for _ in started]
    for process in started:
        process.join(timeout=30)
    assert results[0][1:] == results[1][1:]
    assert results[0][2] == [f"{n}>x" for n in range(50)]
    assert len(processes.encoded()) == 50
    assert len(set(processes.encoded())) == 1


def test_when_the_one_that_makes_the_set_is_killed_the_one_that_waits_takes_over(processes):
    """The maker stands still at its seventh chunk until the other waits, and dies: 30 rows are written."""
    begins, waits = processes.fork.Event(), processes.fork.Event()
    maker = processes.start("maker", fault="prepare.write step=7 do=sleep", begins=begins)
    assert begins.wait(timeout=30)
    heir = processes.start("heir", waits=waits)
    assert waits.wait(timeout=30)
    while processes.encoded().count("maker") < 35:
        assert maker.is_alive()
    maker.kill()
    name, _, texts = processes.done.get(timeout=30)
    maker.join(timeout=30)
    heir.join(timeout=30)
    assert name == "heir"
    assert texts == [f"{n}>x" for n in range(50)]
    assert processes.encoded() == ["maker"] * 35 + ["heir"] * 20


def test_rows_left_out_for_being_evaluated_on_are_counted_in_the_set(write_rows, make_section):
    dev = write_rows([{"text": "a>b"}], name="dev.jsonl")
    train = write_rows([{"text": text} for text in ("a>b", "c>d", "a>b")])
    section = make_section(train, validation=ValidationSourceSection(path=dev.path, exclude_from_train=True))
    for is_new in (True, False):
        said = []
        source = open_sources(section, seed=1, log=said.append).train[0]
        prepared = prepare_set(source, Encoding(encode_bytes, section, identity=IDENTITY), log=said.append)
        assert (prepared.counts.rows, prepared.counts.excluded_rows) == (1, 2)
        assert "data.train: excluded because they are also in data.validation: 2 rows" in said
        assert any("already prepared" in line for line in said) is not is_new


def test_a_mapped_optional_column_that_no_row_has_is_named(write_rows, make_section):
    rows = [{"text": "a>b", "label": "x"}, {"text": "c>d", "label": "y", "more": "e"}]
    for pair, is_right in (("more", True), ("mroe", False)):
        said = []
        written = write_rows(rows, format="labelled", columns={"text_pair": pair})
        source = open_source(written, key="data.train", log=said.append)
        encoding = Encoding(encode_bytes, make_section(written), identity={})
        if is_right:
            assert prepare_set(source, encoding, log=said.append).counts.lacking_rows == {"more": 1}
            assert "data.train: without the column `more`: 1 rows" in said
        else:
            with refused(DataError, "`mroe`", "data.train.columns"):
                prepare_set(source, encoding, log=said.append)


def test_rows_that_lack_an_optional_column_are_still_found_among_the_validation_rows(write_rows, make_section):
    written = write_rows([{"text": "a>b", "label": "x"}, {"text": "c>d", "label": "y", "more": "e"}], format="labelled")
    validation = ValidationSourceSection(path=written.path, format="labelled", exclude_from_train=True)
    train = written.model_copy(update={"columns": {"text_pair": "more"}})
    section = make_section(train, validation=validation)
    source = open_sources(section, seed=0, log=lambda _: None).train[0]
    assert [raw.number for raw in source.rows()] == [2]  # the second has another content, since `more` is read
