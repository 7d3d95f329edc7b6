"""Decodes images: upright, without alpha, in the requested channels, with a limit on their size."""

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
"""The maximum number of pixels (Pillow's own limit): a small file may claim any size."""

_NOT_READ = frozenset({"EPS", "WMF", "GRIB", "BUFR", "HDF5", "MPEG"})
_QUOTED = re.compile(r"""b'[^']*'|b"[^"]*\"""")
"""Bytes of a file that Pillow quotes in its messages."""

_BACKGROUND = (255, 255, 255, 255)
_STRIP_PIXELS = 1 << 20
"""The number of pixels that are converted at a time, since conversions make several copies."""

_WHITE_16 = 65_535
_FAILURES = (
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
"""The exceptions of Pillow's readers for damaged files."""


@dataclass(frozen=True)
class ImageFacts:
    """The facts in the header of an encoded image; width and height in pixels of the upright image."""

    width: int
    height: int
    format: str  # `PNG`, `JPEG`, ...


def decode_image(encoded: bytes, *, mode: Mode = "RGB") -> Image.Image:
    """Return the image (its first frame), rotated by its EXIF orientation, with transparency over white.

    Channels of 16 bits are converted to 8. Raises DataError for a file that is not an image, is truncated, or has more
    than MAX_PIXELS.
    """
    with _opened(encoded) as image:
        ImageOps.exif_transpose(image, in_place=True)
        return _flat(image, mode)


def image_facts(encoded: bytes) -> ImageFacts:
    """Return size and format without decoding the pixels; raises DataError as `decode_image` does."""
    with _opened(encoded) as image:
        width, height = image.size
        if image.getexif().get(_ORIENTATION, 1) in _ROTATED_BY_90:
            width, height = height, width
        return ImageFacts(width, height, image.format or "image")


_ORIENTATION = 0x0112
_ROTATED_BY_90 = (5, 6, 7, 8)
"""Values of EXIF's orientation that swap width and height."""


@contextmanager
def _opened(encoded: bytes) -> Iterator[Image.Image]:
    if not encoded:
        raise DataError("it is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about metadata; a size beyond the limit is an error
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(BytesIO(encoded), formats=_formats()) as image:
                yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"it has more than {MAX_PIXELS:,} pixels. Scale it down") from error
    except UnidentifiedImageError as error:
        raise DataError("it is not an image of a known format") from error
    except _FAILURES as error:
        raise DataError(f"it cannot be decoded: {_QUOTED.sub('...', str(error))}") from error


@cache
def _formats() -> tuple[str, ...]:
    """Return Pillow's formats without those that start other programs (Ghostscript) or have no reader."""
    Image.init()
    return tuple(name for name in Image.ID if name not in _NOT_READ)


def _flat(image: Image.Image, mode: Mode) -> Image.Image:
    """Return the image in the mode, converted in strips, which needs memory for 2 copies of the image instead of 7."""
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
    if strip.mode.startswith("I"):  # 16 bits, which Pillow itself would clip to 255
        grays = np.clip(np.asarray(strip).astype(np.int64), 0, _WHITE_16)
        strip = Image.fromarray(np.round(grays / 257).astype(np.uint8))
    if not strip.has_transparency_data:
        return strip
    colored = strip.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", colored.size, _BACKGROUND), colored)
