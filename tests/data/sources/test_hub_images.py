"""Images of a dataset as `datasets` writes it: bytes and the names of the classes, from the hub or as plain Parquet."""

import io

import pytest
from PIL import Image

from finetune.config.sections.data import DataSection, StreamSection, TrainedSourceSection
from finetune.data.sources.local import load_hub_dataset
from finetune.data.sources.source import open_sources

datasets = pytest.importorskip("datasets")


def png(grey: int) -> bytes:
    stream = io.BytesIO()
    Image.new("L", (2, 2), grey).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a Parquet file of three digits."""
    place = tmp_path_factory.mktemp("digits")
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["zero", "one"])})
    rows = {"img": [{"bytes": png(n), "path": f"{n}.png"} for n in range(3)], "label": [1, 0, 1]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(place / "train.parquet"))
    return place


@pytest.mark.parametrize("stream", [None, StreamSection()])
def test_images_of_the_hub_come_as_bytes(folder, monkeypatch, stream):
    monkeypatch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    source = load_hub_dataset(TrainedSourceSection(name=str(folder), stream=stream))
    rows = [raw.parse() for shard in source.shards() for raw in shard.rows()]
    assert [row["img"]["bytes"] for row in rows] == [png(n) for n in range(3)]
    assert source.class_names()["label"] == ("zero", "one")


def test_a_parquet_file_of_images_is_read_with_the_names_of_its_classes(folder):
    train = {"path": str(folder / "train.parquet"), "columns": {"image": "img"}}
    said = []
    (source,) = open_sources(DataSection(train=train), seed=1, log=said.append).train
    rows = [source.format.read(raw) for raw in source.rows()]
    assert [row["label"] for row in rows] == ["one", "zero", "one"]
    assert [row["image"].read() for row in rows] == [png(n) for n in range(3)]
    assert rows[0]["image"].name == "0.png"
    assert "read as `image_label`" in said[0]
