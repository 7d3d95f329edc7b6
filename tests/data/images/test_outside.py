"""Images that rows name: regular files inside of the source's folder, and nothing else."""

import json
import os
import socket
from io import BytesIO

import pytest
from PIL import Image

from finetune.config.sections.data import DataSection
from finetune.data.classes import Classes
from finetune.data.encoding.labelled_images import LabelledImageEncoder
from finetune.data.images.decode import decode_image
from finetune.data.images.stored_image import MAX_BYTES
from finetune.data.sources.source import open_sources
from finetune.errors import DataError


def png():
    file = BytesIO()
    Image.new("RGB", (2, 2)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def photos(tmp_path):
    """Return a folder with an image, beside it a secret and an image."""
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "in.png").write_bytes(png())
    (tmp_path / "out.png").write_bytes(png())
    (tmp_path / "secret").write_text("doom:x:0:0")
    return folder


def read(folder, image, **keys):
    """Return the image's bytes as a job reads them that has one row with this image."""
    (folder / "rows.jsonl").write_text(json.dumps({"image": str(image), "label": "a"}) + "\n")
    section = DataSection(train={"path": str(folder / "rows.jsonl"), **keys})
    (source,) = open_sources(section, seed=1, log=lambda sentence: None).train
    (row,) = [source.format.read(raw) for raw in source.rows()]
    source.identity()
    (outcome,) = LabelledImageEncoder(Classes(("a",)), "RGB")([row])
    if isinstance(outcome, DataError):
        raise outcome
    return bytes(outcome.arrays["image"])


def test_images_inside_are_read_however_they_are_named(photos):
    for name in ("in.png", "./x/../in.png", photos / "in.png"):
        assert read(photos, name) == png()


@pytest.mark.parametrize("path", ["../out.png", "../secret", "/etc/passwd", "/dev/zero", "x/../../secret"])
def test_a_path_that_leads_out_is_refused_unseen(photos, path):
    with pytest.raises(DataError, match=r"rows.jsonl, row 1: .*is outside of .*data.train.image_root") as caught:
        read(photos, path)
    assert "doom:x" not in str(caught.value)


def test_a_link_that_leads_out_is_refused_unless_links_are_followed(photos):
    (photos / "link.png").symlink_to(photos.parent / "out.png")
    with pytest.raises(DataError, match=r"row 1: .*link.png is a link .*data.train.follow_links: true"):
        read(photos, "link.png")
    assert read(photos, "link.png", follow_links=True) == png()
    with pytest.raises(DataError, match="outside of"):
        read(photos, "../out.png", follow_links=True)


def test_the_job_may_name_another_folder(photos):
    assert read(photos, "out.png", image_root=str(photos.parent)) == png()
    with pytest.raises(DataError, match="outside of"):
        read(photos, "../secret", image_root=str(photos))
    with pytest.raises(DataError, match=r"data.train.image_root: .*gone is not a folder"):
        read(photos, "in.png", image_root=str(photos / "gone"))


def test_only_regular_files_are_read_and_none_is_waited_for(photos):
    os.mkfifo(photos / "fifo.png")
    (photos / "folder.png").mkdir()
    (photos / "loop.png").symlink_to(photos / "loop.png")
    (photos / "zero.png").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(photos / "s.png"))
    for name, reason, keys in (
        ("fifo.png", "it is a FIFO", {}),
        ("folder.png", "it is a folder", {}),
        ("s.png", "it is a socket", {}),
        ("zero.png", "it is a device", {"follow_links": True}),
        ("loop.png", "cannot be read|no file", {}),
        ("in.png/x", "does not exist", {}),
        ("a\0b.png", "NUL", {}),
        ("x" * 300 + ".png", "cannot be read", {}),
    ):
        with pytest.raises(DataError, match=f"row 1: .*({reason})"):
            read(photos, name, **keys)


def test_a_file_larger_than_images_are_is_not_read(photos):
    with (photos / "huge.png").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(DataError, match="the limit is"):
        read(photos, "huge.png")


def test_messages_show_no_bytes_of_a_file(photos):
    (photos / "text.png").write_text("doom:x:0:0")
    (photos / "chunk.png").write_bytes(png()[:8] + b"\0\0\0\x01doom" + b"x" * 20)
    for name in ("text.png", "chunk.png"):
        with pytest.raises(DataError, match=f"{name} cannot be used") as caught:
            read(photos, name)
        assert "doom" not in str(caught.value)


def test_decoding_postscript_starts_no_external_program():
    with pytest.raises(DataError, match="not an image of a known format"):
        decode_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")
