"""An image processor for a model that is built from its config."""

from typing import Any

from transformers import ViTImageProcessor

from finetune.config.sections.model import ImageProcessorSection


def built_image_processor(section: ImageProcessorSection) -> Any:
    """Return one that scales images to the section's size and normalises each channel by its values."""
    return ViTImageProcessor(
        do_resize=True,
        size={"height": section.size, "width": section.size},
        do_normalize=True,
        image_mean=list(section.mean),
        image_std=list(section.std),
    )
