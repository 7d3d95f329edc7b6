"""Two images become one, and so do their labels: mixup and CutMix."""

import math
from dataclasses import dataclass
from random import Random

from torch import Tensor


@dataclass(frozen=True)
class Mixed:
    """An image made of two, and the share of the first one's label; the rest is the second's."""

    pixels: Tensor  # [channels, height, width]
    share: float


def mix(one: Tensor, other: Tensor, *, mixup: float, cutmix: float, chance: Random) -> Mixed:
    """Return both as one; where both alphas are above 0, each way is taken as often as the other."""
    cuts = cutmix > 0 and (mixup == 0 or chance.random() < 0.5)
    return _cut(one, other, cutmix, chance) if cuts else _blended(one, other, mixup, chance)


def _blended(one: Tensor, other: Tensor, alpha: float, chance: Random) -> Mixed:
    """Return a weighted mean of both (Zhang et al., 2017, arXiv:1710.09412)."""
    share = chance.betavariate(alpha, alpha)
    return Mixed(share * one + (1 - share) * other, share)


def _cut(one: Tensor, other: Tensor, alpha: float, chance: Random) -> Mixed:
    """Return the first with a rectangle of the second at the same place (Yun et al., 2019, arXiv:1905.04899)."""
    height, width = one.shape[-2:]
    side = math.sqrt(1 - chance.betavariate(alpha, alpha))
    middle, centre = chance.randrange(height), chance.randrange(width)
    top, bottom = _around(middle, int(height * side), height)
    left, right = _around(centre, int(width * side), width)
    pixels = one.clone()
    pixels[:, top:bottom, left:right] = other[:, top:bottom, left:right]
    return Mixed(pixels, 1 - (bottom - top) * (right - left) / (height * width))


def _around(place: int, size: int, end: int) -> tuple[int, int]:
    return max(0, place - size // 2), min(end, place - size // 2 + size)
