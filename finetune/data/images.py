"""Images in rows: a path, bytes, a `{bytes, path}` object, or base64 text, never a URL; decoding and transforms."""

import base64
import binascii
import hashlib
import math
import os
import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from finetune.config.sections.data import ImagesSection
from finetune.data.rows import describe
from finetune.errors import DataError
from finetune.runtime.files.read import open_regular, require_regular

_MIN_BASE64_LENGTH = 64

MAX_BYTES = 1 << 30
"""The maximum size of an image file."""


@dataclass(frozen=True)
class ImageRoot:
    """The folders in which image files named by rows must be; without folders, rows must not name files."""

    folders: tuple[Path, ...]
    key: str  # of the source in the job YAML
    follow_links: bool = False
    counts_from: Path | None = None  # the folder to which paths are relative; None for the folder of their rows

    def refuse_outside(self, path: Path, *, title: str) -> None:
        """Raise DataError for a path outside of all folders, such as `../x` or an absolute path."""
        normalized = Path(os.path.normpath(path))
        is_inside = any(normalized.is_relative_to(folder.absolute()) for folder in self.folders)
        if not is_inside and not self._resolves_inside(path):  # a folder may have several names
            raise DataError(
                f"{title} is the path `{path}`, which is outside of {self._describe()}. Write "
                f"{self.key}.image_root: FOLDER, the folder that contains all images."
            )

    def resolve(self, path: Path) -> Path:
        """Return the resolved path; raises DataError for a link to a file outside of all folders."""
        if not self.follow_links and not self._resolves_inside(path):
            remedy = f"To read such images, set {self.key}.follow_links: true."
            raise DataError(f"{path} is a link to a file outside of {self._describe()}. {remedy}")
        return path.resolve()

    def _resolves_inside(self, path: Path) -> bool:
        target = path.resolve()
        return any(target.is_relative_to(folder.resolve()) for folder in self.folders)

    def _describe(self) -> str:
        return " and ".join(map(str, self.folders)) or "the rows, which do not come from a local folder"


@dataclass(frozen=True)
class StoredImage:
    """An encoded image in memory, or in a file that is read on demand, which is cheap to pickle."""

    name: str  # for messages: the file, or the name in the row
    path: Path | None = None
    content: bytes | None = None
    root: ImageRoot | None = None  # the folders in which the file must be

    def read(self) -> bytes:
        """Return the encoded bytes; raises DataError for a file that cannot be read."""
        if self.content is not None:
            return self.content
        path = self.file()
        try:
            with open_regular(path) as stream:
                return stream.read()
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}") from error

    def file(self) -> Path:
        """Return the file; raises DataError if it is outside of the root, not a regular file, or above MAX_BYTES."""
        assert self.path is not None
        try:
            path = self.path if self.root is None else self.root.resolve(self.path)
            size = require_regular(path).st_size
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DataError(f"{self.path} does not exist") from error
        except (OSError, RuntimeError) as error:  # RuntimeError: a circular link, in Python 3.11
            raise DataError(f"{self.path} cannot be read: {getattr(error, 'strerror', error)}") from error
        if size > MAX_BYTES:
            raise DataError(f"{self.path} has {size:,} bytes, but the limit is {MAX_BYTES:,}")
        return path

    def digest(self) -> str:
        """Return a digest of the encoded bytes, independent of the name."""
        return hashlib.blake2b(self.read(), digest_size=16).hexdigest()


def stored_image(
    value: Any, *, folder: Path | None, title: str = "the image", root: ImageRoot | None = None
) -> StoredImage:
    """Return the image of a column; a relative path is relative to `folder`, None if the row has no folder.

    Does not read files. Raises DataError, which starts with the title, for a URL, for a path outside of the root, and
    for a value that cannot be an image.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return StoredImage(f"{len(value):,} bytes", content=bytes(value))
    if isinstance(value, dict) and not {"bytes", "path"}.isdisjoint(value):
        content, path = value.get("bytes"), value.get("path")
        if content is None and path is None:
            raise DataError(f"{title} has neither bytes nor a path.")
        if content is None:
            return stored_image(path, folder=folder, title=title, root=root)
        image = stored_image(content, folder=folder, title=title, root=root)
        return StoredImage(str(path), content=image.content) if path else image
    if isinstance(value, str):
        return _from_text(value, folder=folder, title=title, root=root)
    raise DataError(f"{title} must be a path, bytes, base64 or a `{{bytes, path}}` object, but is {describe(value)}.")


ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".jp2", ".avif")
"""The extensions of image files."""


_LONGEST_ENDING = max(map(len, ENDINGS))


def looks_like_images(value: Any) -> bool:
    """Return whether the value is an image, the name of an image file, or a list of these; other text is not."""
    if isinstance(value, list | tuple):
        return bool(value) and all(map(looks_like_images, value))
    if isinstance(value, dict):
        return not {"bytes", "path"}.isdisjoint(value) and value.keys() <= {"bytes", "path"} and any(value.values())
    if isinstance(value, str):
        return value[-_LONGEST_ENDING:].lower().endswith(ENDINGS) and "\n" not in value
    return isinstance(value, bytes | bytearray | memoryview)


def folder_of(origin: str) -> Path | None:
    """Return the folder to which paths in rows of this origin are relative; None if it is not on this machine.

    >>> folder_of("/data/rows.jsonl"), folder_of("s3://bucket/rows.jsonl")
    (PosixPath('/data'), None)
    """
    path = Path(origin)
    if "://" in origin or not path.is_absolute():
        return None
    return path if path.is_dir() else path.parent


def _from_text(text: str, *, folder: Path | None, title: str, root: ImageRoot | None) -> StoredImage:
    if text.startswith("data:"):
        head, comma, body = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise DataError(f"{title} is a data URI that is not in base64.")
        return StoredImage("base64", content=_decoded(body, title=title))
    if "://" in text:
        raise DataError(
            f"{title} is a URL ({text[:80]}), but images are not downloaded during training. Download them and write "
            "their paths."
        )
    if not text.strip():
        raise DataError(f"{title} is empty.")
    if len(text) >= _MIN_BASE64_LENGTH and "." not in text:
        return StoredImage("base64", content=_decoded(text, title=title))
    if "\0" in text:
        raise DataError(f"{title} has a NUL character, which no path can contain.")
    path, base = Path(text), (root and root.counts_from) or folder
    if not path.is_absolute():
        if base is None:
            raise DataError(
                f"{title} is the relative path `{path}`, but its rows do not come from a local folder. Download rows "
                f"and images, or put the images' bytes into the rows."
            )
        path = base / path
    if root is not None:
        root.refuse_outside(path, title=title)
    return StoredImage(str(path), path=path, root=root)


def _decoded(text: str, *, title: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except binascii.Error as error:
        raise DataError(f"{title} is neither a path with a suffix of images nor valid base64: {error}.") from error


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
    """Return Pillow's formats except formats that start other programs (Ghostscript) or have no reader."""
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
        if strip.mode.startswith("I"):  # 16 bits, which Pillow itself would clip to 255
            grays = np.clip(np.asarray(strip).astype(np.int64), 0, _WHITE_16)
            strip = Image.fromarray(np.round(grays / 257).astype(np.uint8))
        if strip.has_transparency_data:
            colored = strip.convert("RGBA")
            strip = Image.alpha_composite(Image.new("RGBA", colored.size, _BACKGROUND), colored)
        flat.paste(strip.convert(mode), (0, top))
    return flat


_RATIOS = (3 / 4, 4 / 3)
"""Aspect ratios (width / height) of random crops (Szegedy et al., 2014, arXiv:1409.4842)."""

_MAX_TRIES = 10
_KEEP_SIZE = {"do_resize": False, "do_center_crop": False, "do_pad": False}
_TO_PIXELS_ONLY = {"do_rescale": False, "do_normalize": False}


@dataclass(frozen=True)
class ImageTransform:
    """Converts images to pixels with the processor's own code, as later users of the model do."""

    processor: Any  # an image processor of transformers
    section: ImagesSection

    @cached_property
    def mode(self) -> Mode:
        """Return the mode for decoding images; raises DataError unless the processor has 1 or 3 channels."""
        mean = getattr(self.processor, "image_mean", None)
        num_channels = len(mean) if isinstance(mean, list | tuple) else 3
        if num_channels not in (1, 3):
            raise DataError(
                f"the image processor normalizes {num_channels} channels, but images have 1 (gray) or 3 (RGB). "
                "Write 1 or 3 numbers in `model.image_processor.mean` and `std`."
            )
        return "L" if num_channels == 1 else "RGB"

    @cached_property
    def size(self) -> tuple[int, int]:
        """Return height and width of the pixels; raises DataError if they depend on the image."""
        sizes = {tuple(self.plain(Image.new(self.mode, size)).shape[-2:]) for size in ((48, 32), (32, 48))}
        if len(sizes) > 1:
            raise DataError(
                "the image processor returns different sizes for images of different shapes, which cannot be batched. "
                "Write `data.images.size`, or use another `model.image_processor`."
            )
        height, width = sizes.pop()
        return int(height), int(width)

    def plain(self, image: Image.Image, **settings: bool) -> Tensor:
        """Return the processor's pixels, float32 [channels, height, width]; unknown settings are left out."""
        supported = {name: value for name, value in settings.items() if hasattr(self.processor, name)}
        pixels: Tensor = self.processor(image, return_tensors="pt", **supported)["pixel_values"][0]
        return pixels.to(torch.float32)

    def augmented(self, image: Image.Image, random: Random) -> Tensor:
        """Return the pixels after random cropping and flipping by `data.images`, float32 [channels, height, width]."""
        section = self.section
        if not (section.crop_scale or section.crop_padding or section.flip):
            return self.plain(image)
        if section.crop_scale:
            height, width = self.size
            box = random_crop_box(image.size, section.crop_scale, random)
            resample = Image.Resampling(int(getattr(self.processor, "resample", None) or Image.Resampling.BILINEAR))
            image = image.resize((width, height), resample=resample, box=box)
        else:
            values = self.plain(image, **_TO_PIXELS_ONLY).clamp(0, 255).to(torch.uint8).numpy()
            image = Image.fromarray(values[0] if len(values) == 1 else np.moveaxis(values, 0, -1))
        if section.crop_padding:
            image = pad_and_crop(image, section.crop_padding, random)
        if section.flip and random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return self.plain(image, **_KEEP_SIZE)


def random_crop_box(
    size: tuple[int, int], scale: tuple[float, ...], random: Random
) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of a random crop whose share of the area is within `scale`.

    If ten tries do not fit, returns the largest center crop with an allowed aspect ratio.
    """
    width, height = size
    for _ in range(_MAX_TRIES):
        area = width * height * random.uniform(scale[0], scale[1])
        ratio = math.exp(random.uniform(math.log(_RATIOS[0]), math.log(_RATIOS[1])))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left, top = random.randint(0, width - crop_width), random.randint(0, height - crop_height)
            return left, top, left + crop_width, top + crop_height
    crop_width = min(width, max(1, round(height * _RATIOS[1])))
    crop_height = min(height, max(1, round(width / _RATIOS[0])))
    left, top = (width - crop_width) // 2, (height - crop_height) // 2
    return left, top, left + crop_width, top + crop_height


def pad_and_crop(image: Image.Image, padding: int, random: Random) -> Image.Image:
    """Return a random crop, with the image's own size, of the image padded with black pixels."""
    left, top = random.randint(-padding, padding), random.randint(-padding, padding)
    return image.crop((left, top, left + image.width, top + image.height))


@dataclass(frozen=True)
class MixedImage:
    """A mix of two images, and the weight of the first one's label; the second has the rest."""

    pixels: Tensor  # [channels, height, width]
    share: float


def mix_images(first: Tensor, second: Tensor, *, mixup: float, cutmix: float, random: Random) -> MixedImage:
    """Return a mixup or CutMix of both images; if both alphas are above 0, one is chosen with equal probability."""
    if cutmix > 0 and (mixup == 0 or random.random() < 0.5):
        height, width = first.shape[-2:]
        side = math.sqrt(1 - random.betavariate(cutmix, cutmix))
        center_y, center_x = random.randrange(height), random.randrange(width)
        top, bottom = _span_around(center_y, int(height * side), height)
        left, right = _span_around(center_x, int(width * side), width)
        pixels = first.clone()
        pixels[:, top:bottom, left:right] = second[:, top:bottom, left:right]
        return MixedImage(pixels, 1 - (bottom - top) * (right - left) / (height * width))
    # a weighted mean of both (Zhang et al., 2017, arXiv:1710.09412)
    share = random.betavariate(mixup, mixup)
    return MixedImage(share * first + (1 - share) * second, share)


def _span_around(center: int, size: int, end: int) -> tuple[int, int]:
    return max(0, center - size // 2), min(end, center - size // 2 + size)
