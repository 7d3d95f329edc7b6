"""Encode labeled images as samples: the encoded bytes, decoded once so that no loader finds a broken image."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np

from finetune.data.classes import Classes
from finetune.data.features import Features, Outcome, result_or_error
from finetune.data.images.decode import Mode, decode_image
from finetune.data.images.stored_image import StoredImage
from finetune.data.rows import Row
from finetune.errors import DataError
from finetune.runtime.files.digests import recorded_as

LABEL, IMAGE, NAME = "label", "image", "name"
"""The arrays of a sample: the index of its class (int64, [1]), its encoded bytes, and the file's name in UTF-8."""

_NAME_PARTS = 2
"""The number of path components in a name: the folder is usually the class."""


@recorded_as("data.encoding.labelled_images.ImageEncoder")
@dataclass(frozen=True)
class LabelledImageEncoder:
    """Encodes rows of `image` and `label`. Cheap to pickle."""

    classes: Classes
    mode: Mode

    def __call__(self, rows: Sequence[Row]) -> Sequence[Outcome]:
        """Return label, encoded bytes and name of each row, or its error."""
        return [result_or_error(self._encoded, row) for row in rows]

    def _encoded(self, row: Row) -> Features:
        image: StoredImage = row["image"]
        content = image.read()
        try:
            decode_image(content, mode=self.mode)
        except DataError as error:
            raise DataError(f"the image {image.name} cannot be used: {error}.") from error
        arrays: dict[str, np.ndarray] = {
            LABEL: np.array([self.classes.index(row["label"])], np.int64),
            IMAGE: np.frombuffer(content, np.uint8),
            NAME: np.frombuffer("/".join(PurePath(image.name).parts[-_NAME_PARTS:]).encode(), np.uint8),
        }
        return Features(arrays)


def image_name(features: Features) -> str:
    """Return the name of the sample's image."""
    return bytes(features.arrays[NAME]).decode("utf-8", "replace")
