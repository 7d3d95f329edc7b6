"""The data of `image-digits`: scikit-learn's handwritten digits as small PNG files, one folder for each digit.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998.
"""

from collections.abc import Mapping
from io import BytesIO

from PIL import Image

from finetune.runtime.optional import require

HELD_OUT_EVERY = 5
SIDE, BRIGHTEST = 8, 16
"""Pixels of a side, and the number that stands for white in scikit-learn's arrays."""


def digit_files() -> Mapping[str, bytes]:
    """Return PNG files by path: `train/7/0042.png`, and every fifth digit in `held_out/`.

    Raises MissingPackage without scikit-learn, which brings the digits along.
    """
    datasets = require("sklearn.datasets", extra="dev", purpose="The data of the recipe image-digits (scikit-learn)")
    pixels, digits = datasets.load_digits(return_X_y=True)
    files = {}
    for number, (row, digit) in enumerate(zip(pixels.tolist(), digits.tolist(), strict=True)):
        part = "held_out" if number % HELD_OUT_EVERY == 0 else "train"
        files[f"{part}/{digit}/{number:04}.png"] = _png(row)
    return files


def _png(row: list[float]) -> bytes:
    stream = BytesIO()
    Image.frombytes("L", (SIDE, SIDE), bytes(round(value * 255 / BRIGHTEST) for value in row)).save(stream, "PNG")
    return stream.getvalue()
