"""An image processor for a model that is built from its config, and whether a processor fits its model."""

from typing import Any

import transformers
from PIL import Image
from transformers import PreTrainedConfig

from finetune.config.sections.model import ImageProcessorSection
from finetune.errors import ModelError


def built_image_processor(section: ImageProcessorSection) -> Any:
    """Return one that scales images to the section's size and normalises each channel by its values."""
    if len(section.mean) != len(section.std):
        raise ModelError(
            f"model.image_processor: `mean` has {len(section.mean)} numbers and `std` {len(section.std)}. "
            "Write one for each channel in both."
        )
    return _class_of_vit()(
        do_resize=True,
        size={"height": section.size, "width": section.size},
        do_normalize=True,
        image_mean=list(section.mean),
        image_std=list(section.std),
    )


def with_size(processor: Any, size: int) -> Any:
    """Return the processor giving squares of that size: scaled and cut as it did before."""
    values = processor.to_dict()
    values["size"] = {"height": size, "width": size}
    if "shortest_edge" in _names(processor.size):
        values["size"] = {"shortest_edge": size}
    if getattr(processor, "do_center_crop", None):
        values["crop_size"] = {"height": size, "width": size}
    return type(processor).from_dict(values)


def check_pixels(config: PreTrainedConfig, processor: Any) -> None:
    """Raise ModelError where the model wants images of another size, or with other channels, than they are given."""
    mean = getattr(processor, "image_mean", None)
    if not isinstance(mean, list | tuple):
        return
    num_channels, wanted = len(mean), getattr(config, "num_channels", None)
    if wanted not in (None, num_channels):
        raise ModelError(
            f"the model reads {wanted} channels and its images have {num_channels}, as `mean` and `std` of the image "
            f"processor say. Write `num_channels: {num_channels}` in `model.from_config.values`, or {wanted} numbers "
            "in `model.image_processor.mean` and `std`."
        )
    wish = getattr(config, "image_size", None)
    if wish is None or not hasattr(config, "patch_size"):  # without patches a model takes any size
        return
    height, width = pixel_size(processor, num_channels=num_channels)
    if (height, width) != (tuple(wish) if isinstance(wish, list | tuple) else (wish, wish)):
        raise ModelError(
            f"the model reads images of {wish} pixels a side and is given {height} x {width}. Write "
            f"`image_size: {height}` in `model.from_config.values`, or `data.images.size: {wish}`."
        )


def pixel_size(processor: Any, *, num_channels: int) -> tuple[int, int]:
    """Return height and width of what the processor makes of a square image."""
    blank = Image.new("L" if num_channels == 1 else "RGB", (64, 64))
    height, width = processor(blank, return_tensors="pt")["pixel_values"].shape[-2:]
    return int(height), int(width)


def _class_of_vit() -> Any:
    """Return ViTImageProcessor, looked up without the warning that torchvision is missing: nobody needs it."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        return transformers.ViTImageProcessor
    finally:
        transformers.logging.set_verbosity(verbosity)


def _names(size: Any) -> frozenset[str]:
    """Return the keys that are set in a processor's `size`, a dict or transformers' own record."""
    found = dict(size) if isinstance(size, dict) else vars(size)
    return frozenset(name for name, value in found.items() if value is not None)
