"""Image transforms: the model's image processor, random crops and flips, mixup and CutMix."""

import math
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from finetune.config.sections.data import ImagesSection
from finetune.data.images.decode import Mode
from finetune.errors import DataError

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

    def plain(self, image: Image.Image) -> Tensor:
        """Return the processor's pixels, float32 [channels, height, width]."""
        return self._processed(image)

    def augmented(self, image: Image.Image, random: Random) -> Tensor:
        """Return the pixels after random cropping and flipping by `data.images`, float32 [channels, height, width]."""
        section = self.section
        if not (section.crop_scale or section.crop_padding or section.flip):
            return self.plain(image)
        if section.crop_scale:
            height, width = self.size
            box = random_crop_box(image.size, section.crop_scale, random)
            image = image.resize((width, height), resample=self._resample, box=box)
        else:
            image = self._scaled(image)
        if section.crop_padding:
            image = pad_and_crop(image, section.crop_padding, random)
        if section.flip and random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return self._processed(image, **_KEEP_SIZE)

    @property
    def _resample(self) -> Image.Resampling:
        return Image.Resampling(int(getattr(self.processor, "resample", None) or Image.Resampling.BILINEAR))

    def _scaled(self, image: Image.Image) -> Image.Image:
        """Return the image resized and cropped by the processor, without rescaling and normalization."""
        values = self._processed(image, **_TO_PIXELS_ONLY).clamp(0, 255).to(torch.uint8).numpy()
        return Image.fromarray(values[0] if len(values) == 1 else np.moveaxis(values, 0, -1))

    def _processed(self, image: Image.Image, **settings: bool) -> Tensor:
        supported = {name: value for name, value in settings.items() if hasattr(self.processor, name)}
        pixels: Tensor = self.processor(image, return_tensors="pt", **supported)["pixel_values"][0]
        return pixels.to(torch.float32)


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
