"""Encoded bytes become pixels: upright, without alpha, in the channels asked for, never more than memory bears."""

import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from finetune.errors import DataError

Mode = Literal["RGB", "L"]

MAX_PIXELS = 89_478_485
"""Pixels of the largest image that is decoded (Pillow's own limit): a small file may claim any size."""

_NOT_READ = frozenset({"EPS", "WMF", "GRIB", "BUFR", "HDF5", "MPEG"})
_QUOTED = re.compile(r"""b'[^']*'|b"[^"]*\"""")
"""Bytes of a file that Pillow shows in its messages."""

_BACKGROUND = (255, 255, 255, 255)
_STRIP_PIXELS = 1 << 20
"""Pixels that are converted at a time where a conversion needs several copies."""

_WHITE_16 = 65_535
_FAULTS = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    OverflowError,
    ZeroDivisionError,
    IndexError,
    KeyError,
    TypeError,
    AttributeError,
    RuntimeError,
    struct.error,
    MemoryError,
)
"""What Pillow's readers raise for files that are broken in one way or another."""


@dataclass(frozen=True)
class ImageFacts:
    """What the head of an encoded image says; width and height in pixels, as it is to be seen."""

    width: int
    height: int
    kind: str  # `PNG`, `JPEG`, ...


def decode_image(encoded: bytes, *, mode: Mode = "RGB") -> Image.Image:
    """Return the image (of several frames the first) upright by its EXIF orientation, over white where it has alpha.

    16 bits a channel become 8. Raises DataError in plain words for what is no image, is cut off, or has more than
    MAX_PIXELS.
    """
    with _opened(encoded) as image:
        ImageOps.exif_transpose(image, in_place=True)
        return _flat(image, mode)


def image_facts(encoded: bytes) -> ImageFacts:
    """Return size and kind without decoding the pixels; raises DataError likewise."""
    with _opened(encoded) as image:
        width, height = image.size
        if image.getexif().get(_ORIENTATION, 1) in _LYING:
            width, height = height, width
        return ImageFacts(width, height, image.format or "image")


_ORIENTATION = 0x0112
_LYING = (5, 6, 7, 8)
"""Values of EXIF's orientation by which width and height change places."""


@contextmanager
def _opened(encoded: bytes) -> Iterator[Image.Image]:
    if not encoded:
        raise DataError("it is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata; a size beyond the limit is an error
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(BytesIO(encoded), formats=_formats()) as image:
                yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"it has more than {MAX_PIXELS:,} pixels. Scale it down") from error
    except UnidentifiedImageError as error:
        raise DataError("it is not an image of a known format") from error
    except _FAULTS as error:
        raise DataError(f"it cannot be decoded: {_QUOTED.sub('...', str(error))}") from error


@cache
def _formats() -> tuple[str, ...]:
    """Return Pillow's formats without those that start other programs (Ghostscript) or only name a reader."""
    Image.init()
    return tuple(name for name in Image.ID if name not in _NOT_READ)


def _flat(image: Image.Image, mode: Mode) -> Image.Image:
    """Return the image in the mode, converted in strips: an image within the limit is there twice, not seven times."""
    image.load()
    if image.mode == "F":
        raise DataError("its pixels are floats. Save it with 8 bits per channel")
    if image.mode == mode and not image.has_transparency_data:
        return image
    flat = Image.new(mode, image.size)
    rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        flat.paste(_flat_strip(strip).convert(mode), (0, top))
    return flat


def _flat_strip(strip: Image.Image) -> Image.Image:
    if strip.mode.startswith("I"):
        strip = _of_8_bits(strip)
    if not strip.has_transparency_data:
        return strip
    colored = strip.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", colored.size, _BACKGROUND), colored)


def _of_8_bits(image: Image.Image) -> Image.Image:
    """Return the greys scaled from 16 bits: Pillow itself would cut off what is above 255."""
    greys = np.clip(np.asarray(image).astype(np.int64), 0, _WHITE_16)
    return Image.fromarray(np.round(greys / 257).astype(np.uint8))
