"""The digest of a large file is cached until the file changes."""

import hashlib
import os

import pytest

from finetune.runtime.files import digests


@pytest.fixture
def read(monkeypatch, tmp_path):
    """Count the reads; files count as large from 10 bytes, and the cache is in a folder of the test."""
    read: list[str] = []
    really = digests._read
    monkeypatch.setattr(digests, "_read", lambda path, **how: read.append(path.name) or really(path, **how))
    monkeypatch.setattr(digests, "LARGE_BYTES", 10)
    monkeypatch.setattr(digests, "CACHE_FOLDER", str(tmp_path / "remembered"))
    monkeypatch.setattr(digests, "_MIN_AGE_SECONDS", -1.0)
    return read


def test_a_large_file_is_read_once(read, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("x" * 20)
    assert digests.file_digest(file) == digests.file_digest(file)
    assert read == ["rows.jsonl"]


def test_other_content_of_the_same_size_and_time_is_read(read, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("x" * 20)
    before, state = digests.file_digest(file), file.stat()
    file.write_text("y" * 20)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert digests.file_digest(file) != before
    assert len(read) == 2


def test_a_file_that_was_written_just_now_is_not_remembered(read, tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "_MIN_AGE_SECONDS", 3600.0)
    file = tmp_path / "rows.jsonl"
    file.write_text("x" * 20)
    digests.file_digest(file)
    digests.file_digest(file)
    assert len(read) == 2


def test_digests_of_small_files_are_not_cached(read, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("x")
    digests.file_digest(file)
    assert not (tmp_path / "remembered").exists()


def test_an_unwritable_digest_cache_is_not_an_error(read, tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("")
    monkeypatch.setattr(digests, "CACHE_FOLDER", str(tmp_path / "taken" / "inside"))
    file = tmp_path / "rows.jsonl"
    file.write_text("x" * 20)
    assert digests.file_digest(file) == digests.file_digest(file)


def test_truncated_digest_cache_entries_are_rewritten(read, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("x" * 20)
    digests.file_digest(file)
    (note,) = (tmp_path / "remembered").iterdir()
    note.write_text('{"state"')
    digests.file_digest(file)
    digests.file_digest(file)
    assert len(read) == 2


def test_the_digest_of_weights_is_that_of_sha256sum_and_remembered_too(monkeypatch, read, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_text("x" * 20)
    before = digests.sha256_digest(file)
    assert before == hashlib.sha256(b"x" * 20).hexdigest() != digests.file_digest(file)
    monkeypatch.setattr(digests.hashlib, "file_digest", lambda *_: pytest.fail("read again"))
    assert digests.sha256_digest(file) == before
