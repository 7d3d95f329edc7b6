"""Images become the model's pixels by its image processor, random crops and flips, mixup and CutMix."""

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
"""Width over height of a random part (Szegedy et al., 2014, arXiv:1409.4842)."""

_TRIES = 10
_AS_IT_IS = {"do_resize": False, "do_center_crop": False, "do_pad": False}
_TO_PIXELS_ONLY = {"do_rescale": False, "do_normalize": False}


@dataclass(frozen=True)
class ImageTransform:
    """Makes pixels of images with the processor's own code, so that later users of the model see the same."""

    processor: Any  # an image processor of transformers
    section: ImagesSection

    @cached_property
    def mode(self) -> Mode:
        """Return the channels that images are decoded to; raises DataError for a processor of neither 1 nor 3."""
        mean = getattr(self.processor, "image_mean", None)
        num_channels = len(mean) if isinstance(mean, list | tuple) else 3
        if num_channels not in (1, 3):
            raise DataError(
                f"the image processor normalizes {num_channels} channels, and images have 1 (grey) or 3 (RGB). "
                "Write as many numbers in `model.image_processor.mean` and `std`."
            )
        return "L" if num_channels == 1 else "RGB"

    @cached_property
    def size(self) -> tuple[int, int]:
        """Return height and width of the pixels; raises DataError where they depend on the image."""
        sizes = {tuple(self.plain(Image.new(self.mode, size)).shape[-2:]) for size in ((48, 32), (32, 48))}
        if len(sizes) > 1:
            raise DataError(
                "the image processor gives images of different shapes different sizes, which make no batch. "
                "Write `data.images.size`, or name another `model.image_processor`."
            )
        height, width = sizes.pop()
        return int(height), int(width)

    def plain(self, image: Image.Image) -> Tensor:
        """Return the pixels as the processor makes them, float32 [channels, height, width]."""
        return self._processed(image)

    def drawn(self, image: Image.Image, chance: Random) -> Tensor:
        """Return the pixels of a part that is drawn by chance, mirrored or not, likewise; as `data.images` says."""
        section = self.section
        if not (section.crop_scale or section.crop_padding or section.flip):
            return self.plain(image)
        if section.crop_scale:
            height, width = self.size
            box = random_crop_box(image.size, section.crop_scale, chance)
            image = image.resize((width, height), resample=self._resample, box=box)
        else:
            image = self._scaled(image)
        if section.crop_padding:
            image = pad_and_crop(image, section.crop_padding, chance)
        if section.flip and chance.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return self._processed(image, **_AS_IT_IS)

    @property
    def _resample(self) -> Image.Resampling:
        return Image.Resampling(int(getattr(self.processor, "resample", None) or Image.Resampling.BILINEAR))

    def _scaled(self, image: Image.Image) -> Image.Image:
        """Return the whole image scaled and cut as the processor does it, before its numbers are changed."""
        values = self._processed(image, **_TO_PIXELS_ONLY).clamp(0, 255).to(torch.uint8).numpy()
        return Image.fromarray(values[0] if len(values) == 1 else np.moveaxis(values, 0, -1))

    def _processed(self, image: Image.Image, **settings: bool) -> Tensor:
        known = {name: value for name, value in settings.items() if hasattr(self.processor, name)}
        pixels: Tensor = self.processor(image, return_tensors="pt", **known)["pixel_values"][0]
        return pixels.to(torch.float32)


def random_crop_box(
    size: tuple[int, int], scale: tuple[float, ...], chance: Random
) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of a part with a share of the area within `scale`.

    Where ten tries find none within the image, as much of its center as has a ratio that is allowed.
    """
    width, height = size
    for _ in range(_TRIES):
        area = width * height * chance.uniform(scale[0], scale[1])
        ratio = math.exp(chance.uniform(math.log(_RATIOS[0]), math.log(_RATIOS[1])))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left, top = chance.randint(0, width - wide), chance.randint(0, height - high)
            return left, top, left + wide, top + high
    wide = min(width, max(1, round(height * _RATIOS[1])))
    high = min(height, max(1, round(width / _RATIOS[0])))
    left, top = (width - wide) // 2, (height - high) // 2
    return left, top, left + wide, top + high


def pad_and_crop(image: Image.Image, padding: int, chance: Random) -> Image.Image:
    """Return a part of the image's own size of the image with this number of black pixels around it."""
    left, top = chance.randint(-padding, padding), chance.randint(-padding, padding)
    return image.crop((left, top, left + image.width, top + image.height))


@dataclass(frozen=True)
class MixedImage:
    """An image made of two, and the share of the first one's label; the rest is the second's."""

    pixels: Tensor  # [channels, height, width]
    share: float


def mix_images(one: Tensor, other: Tensor, *, mixup: float, cutmix: float, chance: Random) -> MixedImage:
    """Return both as one; where both alphas are above 0, each way is taken as often as the other."""
    cuts = cutmix > 0 and (mixup == 0 or chance.random() < 0.5)
    return _cut(one, other, cutmix, chance) if cuts else _blended(one, other, mixup, chance)


def _blended(one: Tensor, other: Tensor, alpha: float, chance: Random) -> MixedImage:
    """Return a weighted mean of both (Zhang et al., 2017, arXiv:1710.09412)."""
    share = chance.betavariate(alpha, alpha)
    return MixedImage(share * one + (1 - share) * other, share)


def _cut(one: Tensor, other: Tensor, alpha: float, chance: Random) -> MixedImage:
    """Return the first with a rectangle of the second at the same place (Yun et al., 2019, arXiv:1905.04899)."""
    height, width = one.shape[-2:]
    side = math.sqrt(1 - chance.betavariate(alpha, alpha))
    middle, center = chance.randrange(height), chance.randrange(width)
    top, bottom = _around(middle, int(height * side), height)
    left, right = _around(center, int(width * side), width)
    pixels = one.clone()
    pixels[:, top:bottom, left:right] = other[:, top:bottom, left:right]
    return MixedImage(pixels, 1 - (bottom - top) * (right - left) / (height * width))


def _around(place: int, size: int, end: int) -> tuple[int, int]:
    return max(0, place - size // 2), min(end, place - size // 2 + size)
