"""Rows of an image and its class."""

from finetune.data.formats.columns import Columns
from finetune.data.images.read import stored_image
from finetune.data.rows import Row, describe
from finetune.errors import DataError


def read_image_label(columns: Columns) -> Row:
    """Return the image, whose file is not read yet, and its label."""
    title = columns.title("image")
    image = stored_image(columns.value("image"), folder=columns.folder, title=title, root=columns.image_root)
    label = columns.labels("label")
    if not isinstance(label, str | int):
        raise DataError(f"{columns.title('label')} must be text or a whole number, but is {describe(label)}.")
    return {"image": image, "label": label}
