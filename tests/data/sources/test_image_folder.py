"""A folder of images by class is a source like any other, and what images a file of rows refers to is part of it."""

import io
import json

import pytest
from PIL import Image

from finetune.config.sections.data import DataSection, SourceSection
from finetune.data.sources.local import find_local
from finetune.data.sources.source import open_sources
from finetune.errors import DataError
from finetune.runtime import digests


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
    return open_sources(section, seed=1, say=said.append), said


def labels(source):
    return [source.format.read(raw)["label"] for raw in source.rows()]


def test_the_sub_folders_are_the_labels(photos):
    sources, said = opened(photos)
    (train,) = sources.train
    assert labels(train) == ["cat", "cat", "cat", "dog", "dog"]
    assert train.num_rows() == 5
    first = next(iter(train.rows()))
    assert first.place == f"{photos}, row 1"
    assert train.format.read(first)["image"].read() == png(1)
    assert "read as `image_label`" in said[0]


def test_rows_are_skipped_taken_and_held_out(photos):
    sources, _ = opened(photos, train={"path": str(photos), "skip": 2, "take": 2})
    assert labels(sources.train[0]) == ["cat", "dog"]
    sources, _ = opened(photos, validation={"hash_fraction": 0.5})
    held_out, kept = labels(sources.validation), labels(sources.train[0])
    assert sorted(held_out + kept) == ["cat", "cat", "cat", "dog", "dog"]
    assert held_out
    assert kept


def test_equal_images_are_never_on_both_sides(photos):
    (photos / "cat" / "4.png").write_bytes(png(1))
    for share in (0.3, 0.5):
        sources, _ = opened(photos, validation={"hash_fraction": share})
        held_out = {sources.train[0].format.read(raw)["image"].digest() for raw in sources.train[0].rows()}
        assert not held_out & {raw.parse()["image"].digest() for raw in sources.validation.rows()}


def test_another_image_or_another_label_is_other_data(photos):
    def digest():
        return find_local(SourceSection(path=str(photos)), key="data.train", say=print).digest()

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
    monkeypatch.setattr(digests, "FOLDER", str(tmp_path / "remembered"))
    monkeypatch.setattr(digests, "_SETTLED_SECONDS", -1.0)
    for _ in range(2):
        find_local(SourceSection(path=str(photos)), key="data.train", say=print).digest()
    assert len(read) == 5


def test_images_without_a_class_and_splits_are_refused(photos, tmp_path):
    photos.rename(tmp_path / "train")
    with pytest.raises(DataError, match=r"are splits, not classes. Name one of them: .*train\."):
        opened(tmp_path)
    (tmp_path / "train" / "stray.png").write_bytes(png(1))
    with pytest.raises(DataError, match="1 images that are in no sub-folder"):
        opened(tmp_path / "train")


def test_what_a_row_refers_to_is_part_of_its_source(photos):
    rows = [{"image": f"cat/{number}.png", "label": "cat"} for number in (1,)] + [{"image": "dog/1.png", "label": 1}]
    (photos / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def identity():
        return opened(photos / "rows.jsonl")[0].train[0].identity()

    before = identity()
    assert identity() == before
    (photos / "dog" / "1.png").write_bytes(png(9))
    assert identity() != before
    (photos / "dog" / "1.png").unlink()
    with pytest.raises(DataError, match=r"rows\.jsonl, row 2: there is no file .*dog/1\.png"):
        identity()
