"""Whatever an image file is, it becomes upright pixels without alpha, or a sentence that says why not."""

import contextlib
import io
import random

import numpy as np
import pytest
from PIL import Image, features

from finetune.data.images import decode
from finetune.data.images.decode import decode_image, image_facts
from finetune.errors import DataError


def encoded(image: Image.Image, kind: str = "PNG", **settings) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **settings)
    return stream.getvalue()


def two_pixels(*colors, mode: str = "RGB") -> Image.Image:
    image = Image.new(mode, (2, 1))
    image.putpixel((0, 0), colors[0])
    image.putpixel((1, 0), colors[1])
    return image


def test_a_png_keeps_its_pixels():
    image = decode_image(encoded(two_pixels((255, 0, 0), (0, 0, 255))))
    assert np.asarray(image).tolist() == [[[255, 0, 0], [0, 0, 255]]]


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
    assert image_facts(content) == decode.ImageFacts(50, 30, "JPEG")
    assert image_facts(content[:-300]).width == 50


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"<html>not an image</html>", "not an image of a known format"),
        (encoded(Image.effect_noise((64, 64), 50))[:-2000], "cannot be decoded"),
    ],
)
def test_bytes_that_are_not_an_image_are_rejected_with_the_reason(content, reason):
    with pytest.raises(DataError, match=reason):
        decode_image(content)


def test_a_small_file_of_many_pixels_is_refused(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(DataError, match="more than"):
        decode_image(encoded(Image.new("L", (11, 11))))
    monkeypatch.undo()
    assert Image.MAX_IMAGE_PIXELS == decode.MAX_PIXELS


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "AVIF", "PPM", "TGA", "SPIDER"])
def test_a_flipped_bit_is_an_image_or_a_sentence(kind):
    if kind == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    chance = random.Random(kind)
    pixels = np.random.default_rng(0).integers(0, 255, (24, 32, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).convert("F" if kind == "SPIDER" else "RGB")
    content = encoded(image, kind)
    for _ in range(200):
        damaged = bytearray(content)
        damaged[chance.randrange(min(len(damaged), chance.choice((64, 400, 10**6))))] ^= 1 << chance.randrange(8)
        with contextlib.suppress(DataError):
            decode_image(bytes(damaged))
            image_facts(bytes(damaged))


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
        monkeypatch.setattr(decode, "_STRIP_PIXELS", 50)
        assert np.array_equal(np.asarray(decode_image(content, mode=wanted)), whole)
        monkeypatch.undo()
