"""Whatever an image file is, it becomes upright pixels without alpha, or a sentence that says why not."""

import base64
import io
import json
import os
import socket
from io import BytesIO
from random import Random

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from finetune.config.sections.data import DataSection, ImagesSection
from finetune.data import images
from finetune.data.encoding.labelled import Classes, LabelledImageEncoder
from finetune.data.images import (
    MAX_BYTES,
    ImageTransform,
    decode_image,
    image_facts,
    mix_images,
    pad_and_crop,
    random_crop_box,
    stored_image,
)
from finetune.data.sources.source import open_sources
from finetune.errors import DataError
from tests.refusals import refused


def encoded(image: Image.Image, kind: str = "PNG", **settings) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **settings)
    return stream.getvalue()


def two_pixels(*colors, mode: str = "RGB") -> Image.Image:
    image = Image.new(mode, (2, 1))
    image.putpixel((0, 0), colors[0])
    image.putpixel((1, 0), colors[1])
    return image


def test_an_image_is_rotated_by_its_exif_orientation():
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: the first column is the top row, seen from the right
    content = encoded(two_pixels((250, 0, 0), (0, 0, 250)), "PNG", exif=exif)
    assert decode_image(content).size == (1, 2)
    assert (image_facts(content).width, image_facts(content).height) == (1, 2)


def test_alpha_lies_over_white():
    content = encoded(two_pixels((255, 0, 0, 0), (0, 0, 0, 255), mode="RGBA"))
    assert np.asarray(decode_image(content)).tolist() == [[[255, 255, 255], [0, 0, 0]]]
    assert np.asarray(decode_image(content, mode="L")).tolist() == [[255, 0]]


def test_sixteen_bits_are_scaled_and_not_cut_off():
    content = encoded(Image.fromarray(np.array([[0, 257, 65535]], np.uint16)))
    assert np.asarray(decode_image(content, mode="L")).tolist() == [[0, 1, 255]]


def test_facts_need_no_decoding():
    content = encoded(Image.effect_noise((50, 30), 50), "JPEG")
    assert image_facts(content) == images.ImageFacts(50, 30, "JPEG")
    assert image_facts(content[:-300]).width == 50


@pytest.mark.parametrize(
    "content", [b"", b"<html>not an image</html>", encoded(Image.effect_noise((64, 64), 50))[:-2000]]
)
def test_bytes_that_are_not_an_image_are_rejected_with_the_reason(content):
    with refused(DataError):
        decode_image(content)


def test_a_small_file_of_many_pixels_is_refused(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with refused(DataError):
        decode_image(encoded(Image.new("L", (11, 11))))
    monkeypatch.undo()
    assert Image.MAX_IMAGE_PIXELS == images.MAX_PIXELS


TRANSPARENT = {"P": 0, "L": 7, "RGB": (1, 2, 3)}
"""What of a mode without alpha is transparent."""


@pytest.mark.parametrize("transparency", [True, False])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I"])
def test_an_image_that_is_converted_in_strips_is_the_image(mode, transparency, monkeypatch):
    values = np.random.default_rng(0).integers(0, 256, (37, 23, 4), dtype=np.uint8)
    deep = Image.fromarray(values.view(np.uint16)[..., 0].copy())
    image = deep if mode.startswith("I") else Image.fromarray(values, "RGBA").convert(mode)
    keys = {"transparency": TRANSPARENT[mode]} if transparency and mode in TRANSPARENT else {}
    content = encoded(image, "TIFF" if mode in ("CMYK", "YCbCr") else "PNG", **keys)
    for wanted in ("RGB", "L"):
        whole = np.asarray(decode_image(content, mode=wanted))
        monkeypatch.setattr(images, "_STRIP_PIXELS", 50)
        assert np.array_equal(np.asarray(decode_image(content, mode=wanted)), whole)
        monkeypatch.undo()


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
    with refused(DataError, "rows.jsonl, row 1", "data.train.image_root") as caught:
        read(photos, path)
    assert "doom:x" not in str(caught.value)


def test_a_link_that_leads_out_is_refused_unless_links_are_followed(photos):
    (photos / "link.png").symlink_to(photos.parent / "out.png")
    with refused(DataError, "row 1", "link.png", "data.train.follow_links"):
        read(photos, "link.png")
    assert read(photos, "link.png", follow_links=True) == png()
    with refused(DataError):
        read(photos, "../out.png", follow_links=True)


def test_the_job_may_name_another_folder(photos):
    assert read(photos, "out.png", image_root=str(photos.parent)) == png()
    with refused(DataError):
        read(photos, "../secret", image_root=str(photos))
    with refused(DataError, "data.train.image_root"):
        read(photos, "in.png", image_root=str(photos / "gone"))


def test_only_regular_files_are_read_and_none_is_waited_for(photos):
    os.mkfifo(photos / "fifo.png")
    (photos / "folder.png").mkdir()
    (photos / "loop.png").symlink_to(photos / "loop.png")
    (photos / "zero.png").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(photos / "s.png"))
    for name in ("fifo.png", "folder.png", "s.png", "zero.png", "loop.png", "in.png/x", "a\0b.png", "x" * 300 + ".png"):
        with refused(DataError, "row 1: "):
            read(photos, name, follow_links=name == "zero.png")


def test_a_file_larger_than_images_are_is_not_read(photos):
    with (photos / "huge.png").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with refused(DataError):
        read(photos, "huge.png")


def test_messages_show_no_bytes_of_a_file(photos):
    (photos / "text.png").write_text("doom:x:0:0")
    (photos / "chunk.png").write_bytes(png()[:8] + b"\0\0\0\x01doom" + b"x" * 20)
    for name in ("text.png", "chunk.png"):
        with refused(DataError, name) as caught:
            read(photos, name)
        assert "doom" not in str(caught.value)


def test_decoding_postscript_starts_no_external_program():
    with refused(DataError):
        decode_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")


CONTENT = bytes(range(256))


@pytest.mark.parametrize(
    "value",
    [
        CONTENT,
        bytearray(CONTENT),
        {"bytes": CONTENT, "path": "cat.png"},
        base64.b64encode(CONTENT).decode(),
        "data:image/png;base64," + base64.b64encode(CONTENT).decode(),
    ],
)
def test_stored_image_bytes_are_read_unchanged(value):
    assert stored_image(value, folder=None).read() == CONTENT


@pytest.mark.parametrize("value", ["https://example.org/cat.png", "cat.png", {"path": None}, 7, [1, 2], "", "x?" * 40])
def test_a_value_that_is_not_an_image_is_rejected_with_the_column(value):
    with refused(DataError, "`image`"):
        stored_image(value, folder=None, title="column `image`")


MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    return Image.fromarray(np.random.default_rng(3).integers(0, 256, shape, np.uint8))


PROCESSORS = {
    "vit": lambda: transformers.ViTImageProcessor(size={"height": 24, "width": 24}, image_mean=MEAN, image_std=STD),
    "grey": lambda: transformers.ViTImageProcessor(size={"height": 8, "width": 8}, image_mean=[0.3], image_std=[0.4]),
    "resnet": lambda: transformers.ConvNextImageProcessor(size={"shortest_edge": 28}, crop_pct=0.875),
    "clip": lambda: transformers.CLIPImageProcessor(size={"shortest_edge": 20}, crop_size={"height": 16, "width": 16}),
}


@pytest.fixture(params=PROCESSORS)
def processor(request):
    return PROCESSORS[request.param]()


def test_evaluation_images_equal_the_output_of_the_processor(processor):
    views = ImageTransform(processor, ImagesSection())
    image = noise(37, 29, views.mode)
    wanted = processor(image, return_tensors="pt")["pixel_values"][0].float()
    torch.testing.assert_close(views.plain(image), wanted, atol=1e-6, rtol=0)
    assert wanted.shape == (1 if views.mode == "L" else 3, *views.size)
    torch.testing.assert_close(views.augmented(image, Random(1)), wanted, atol=1e-6, rtol=0)


def test_the_whole_image_cut_and_mirrored_is_normalized_alike(processor):
    views = ImageTransform(processor, ImagesSection(flip=True))
    image = noise(37, 29, views.mode)
    plain = views.plain(image)
    drawn = [views.augmented(image, Random(seed)) for seed in range(8)]
    mirrored = [seed for seed, each in enumerate(drawn) if not torch.allclose(each, plain, atol=1e-6)]
    assert 0 < len(mirrored) < 8
    torch.testing.assert_close(drawn[mirrored[0]].flip(-1), plain, atol=1e-6, rtol=0)


def test_a_random_part_lies_within_and_has_a_share_of_the_area():
    chance = Random(5)
    for _ in range(200):
        left, top, right, bottom = random_crop_box((40, 30), (0.2, 0.5), chance)
        assert 0 <= left < right <= 40
        assert 0 <= top < bottom <= 30
        assert 0.15 < (right - left) * (bottom - top) / 1200 < 0.55
    assert random_crop_box((100, 1), (1.0, 1.0), chance) == (49, 0, 50, 1)  # nothing fits: the center


def test_a_shifted_image_has_black_where_nothing_was():
    image = Image.new("L", (3, 3), 255)
    found = {tuple(np.asarray(pad_and_crop(image, 1, Random(seed))).ravel()) for seed in range(60)}
    assert len(found) == 9  # three places by three
    assert (255,) * 9 in found


def test_a_processor_whose_sizes_depend_on_the_image_is_refused():
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 20}, do_center_crop=False)
    with refused(DataError, "`data.images.size`"):
        _ = ImageTransform(processor, ImagesSection()).size


def test_two_channels_are_refused():
    processor = transformers.ViTImageProcessor(image_mean=[0.5, 0.5], image_std=[0.5, 0.5])
    with refused(DataError, "2 channels"):
        _ = ImageTransform(processor, ImagesSection()).mode


ONE, OTHER = torch.zeros(1, 8, 6), torch.ones(1, 8, 6)


def test_mixup_blends_every_pixel_by_the_share():
    for seed in range(20):
        mixed = mix_images(ONE, OTHER, mixup=0.4, cutmix=0.0, random=Random(seed))
        assert torch.equal(mixed.pixels, torch.full_like(ONE, 1 - mixed.share))


def test_cutmix_replaces_the_share_of_pixels_it_reports():
    shares = set()
    for seed in range(50):
        mixed = mix_images(ONE, OTHER, mixup=0.0, cutmix=1.0, random=Random(seed))
        assert mixed.pixels.mean().item() == pytest.approx(1 - mixed.share, abs=1e-6)
        assert set(mixed.pixels.unique().tolist()) <= {0.0, 1.0}
        shares.add(mixed.share)
    assert len(shares) > 15
    assert ONE.sum() == 0  # what was handed in is left as it was
