"""A folder of images by class is a source like any other, and what images a file of rows refers to is part of it."""

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from finetune.config.sections.data import DataSection, SourceSection
from finetune.data.sources.local import find_local
from finetune.data.sources.source import open_sources
from finetune.errors import DataError
from finetune.runtime.files import digests
from tests.refusals import refused


def png(grey: int) -> bytes:
    stream = io.BytesIO()
    Image.new("L", (2, 2), grey).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture
def photos(tmp_path):
    """Return a folder of three cats, one of them deeper, and two dogs."""
    files = {"cat/1.png": 1, "cat/2.PNG": 2, "cat/old/3.png": 3, "dog/1.png": 4, "dog/2.png": 5}
    for name, grey in files.items():
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(grey))
    (tmp_path / "photos" / "cat" / "notes.txt.bak").write_text("no image")
    return tmp_path / "photos"


def opened(path, **keys):
    said = []
    section = DataSection(**{"train": {"path": str(path)}, **keys})
    return open_sources(section, seed=1, log=said.append), said


def labels(source):
    return [source.format.read(raw)["label"] for raw in source.rows()]


def test_the_sub_folders_are_the_labels(photos):
    sources, said = opened(photos)
    (train,) = sources.train
    assert labels(train) == ["cat", "cat", "cat", "dog", "dog"]
    assert train.num_rows() == 5
    first = next(iter(train.rows()))
    assert first.location == f"{photos}, row 1"
    assert train.format.read(first)["image"].read() == png(1)
    assert "read as `image_label`" in said[0]


def test_equal_images_are_never_on_both_sides(photos):
    (photos / "cat" / "4.png").write_bytes(png(1))
    for share in (0.3, 0.5):
        sources, _ = opened(photos, validation={"hash_fraction": share})
        held_out = {sources.train[0].format.read(raw)["image"].digest() for raw in sources.train[0].rows()}
        assert not held_out & {raw.parse()["image"].digest() for raw in sources.validation.rows()}


def test_another_image_or_another_label_is_other_data(photos):
    def digest():
        return find_local(SourceSection(path=str(photos)), key="data.train", log=print).digest

    before = digest()
    assert digest() == before
    (photos / "cat" / "1.png").write_bytes(png(9))
    changed = digest()
    (photos / "cat").rename(photos / "lion")
    assert len({before, changed, digest()}) == 3


def test_a_folder_is_read_once_while_nothing_in_it_is_written(photos, monkeypatch, tmp_path):
    read = []
    really = digests._read
    monkeypatch.setattr(digests, "_read", lambda path: read.append(path) or really(path))
    monkeypatch.setattr(digests, "LARGE_BYTES", 10)
    monkeypatch.setattr(digests, "CACHE_FOLDER", str(tmp_path / "remembered"))
    monkeypatch.setattr(digests, "_MIN_AGE_SECONDS", -1.0)
    for _ in range(2):
        assert find_local(SourceSection(path=str(photos)), key="data.train", log=print).digest
    assert len(read) == 5


def test_images_without_a_class_and_splits_are_refused(photos, tmp_path):
    photos.rename(tmp_path / "train")
    with refused(DataError):
        opened(tmp_path)
    (tmp_path / "train" / "stray.png").write_bytes(png(1))
    with refused(DataError, "1 images"):
        opened(tmp_path / "train")


def test_files_referenced_by_rows_are_part_of_the_source_identity(photos):
    rows = [{"image": f"cat/{number}.png", "label": "cat"} for number in (1,)] + [{"image": "dog/1.png", "label": 1}]
    (photos / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def identity():
        return opened(photos / "rows.jsonl")[0].train[0].identity()

    before = identity()
    assert identity() == before
    (photos / "dog" / "1.png").write_bytes(png(9))
    assert identity() != before
    (photos / "dog" / "1.png").unlink()
    with refused(DataError, "rows.jsonl, row 2", "dog/1.png"):
        identity()


KEY = "data.train"


@pytest.fixture
def folder(tmp_path):
    """Return a folder with two files of rows and a folder in it."""
    made = tmp_path / "rows"
    (made / "old").mkdir(parents=True)
    for name in ("b.jsonl", "a.jsonl.gz", "old/c.jsonl"):
        (made / name).touch()
    return made


def found(path, said=None, **keys):
    files = find_local(SourceSection(path=str(path), **keys), key=KEY, log=(said if said is not None else []).append)
    return [Path(file.name).name for file in files.files]


def test_a_source_folder_reads_all_row_files_and_logs_what_it_skips(folder):
    for name in ("README.md", ".hidden.jsonl", "_SUCCESS"):
        (folder / name).touch()
    said = []
    assert found(folder, said) == ["a.jsonl.gz", "b.jsonl"]
    assert said == [f"{KEY}.path: {folder} also has README.md, old/, which are not read"]


def test_a_folder_without_row_files_is_rejected_with_its_content(tmp_path):
    with refused(DataError, "/**/*.jsonl"):
        found(tmp_path)
    (tmp_path / "notes.md").touch()
    with refused(DataError, "notes.md"):
        found(tmp_path)


def test_a_glob_reads_its_files_by_name(folder):
    assert found(folder / "**" / "*.jsonl*") == ["a.jsonl.gz", "b.jsonl", "c.jsonl"]
    assert found(folder / "[b]*") == ["b.jsonl"]


def test_a_name_that_looks_like_a_glob_is_a_file_where_there_is_one(folder):
    (folder / "[b].jsonl").touch()
    assert found(folder / "[b].jsonl") == ["[b].jsonl"]


@pytest.mark.parametrize("name", ["nothing.jsonl", "nothing/*.jsonl"])
def test_a_missing_source_file_is_named(folder, name):
    with refused(DataError):
        found(folder / name)


def test_a_kind_that_cannot_be_read_is_named_with_those_that_can(folder):
    (folder / "rows.xlsx").touch()
    with refused(DataError, "rows.xlsx", "jsonl, .json, .csv"):
        found(folder / "rows.xlsx")
    (folder / "rows.parquet.gz").touch()
    with refused(DataError, "gz", "zst"):
        found(folder / "rows.parquet.gz")


@pytest.mark.parametrize("pattern", ["", "*.jsonl", "**/*.jsonl"])
def test_a_link_out_of_a_folder_is_followed_only_knowingly(folder, tmp_path, pattern):
    (tmp_path / "secret.jsonl").touch()
    (folder / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    path = f"{folder}/{pattern}".rstrip("/")
    with refused(DataError, "link.jsonl", "secret.jsonl"):
        found(path)
    assert "link.jsonl" in found(path, follow_links=True)


def test_a_symlink_within_the_folder_is_followed(folder):
    (folder / "again.jsonl").symlink_to(folder / "old" / "c.jsonl")
    assert found(folder / "*.jsonl") == ["again.jsonl", "b.jsonl"]


def test_a_source_path_that_is_a_symlink_is_followed_and_logged(folder, tmp_path):
    (tmp_path / "link.jsonl").symlink_to(folder / "b.jsonl")
    said = []
    assert found(tmp_path / "link.jsonl", said) == ["link.jsonl"]
    assert said == [f"{KEY}.path: {tmp_path}/link.jsonl is a link to {folder}/b.jsonl"]
