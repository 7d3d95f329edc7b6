"""Preprocessing of text and images into tensors: a tokenizer, an image processor, or a processor for both."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer, PreTrainedConfig

from finetune.config.sections.data import ImagesSection
from finetune.config.sections.model import ImageProcessorSection, ModelSection
from finetune.errors import ModelError
from finetune.model.loading.hub import loading_errors
from finetune.model.loading.pretrained import load_auto_class, load_named, without_warnings
from finetune.model.tokenizer import TOKENIZER_FILES, add_tokens, ensure_padding, load_tokenizer
from finetune.registry.tasks import InputKind
from finetune.runtime.upstream import without_hub_retries

NO_CHANGES = ImagesSection()
"""Images get the sizes that the model's own processor has."""


def build_image_processor(section: ImageProcessorSection) -> Any:
    """Return an image processor that resizes to the section's size and normalizes each channel by its values."""
    if len(section.mean) != len(section.std):
        raise ModelError(
            f"model.image_processor: `mean` has the length {len(section.mean)} and `std` {len(section.std)}. "
            "Both need one number per channel."
        )
    with without_warnings():  # about torchvision, which is not needed
        processor_class: Any = transformers.ViTImageProcessor
    return processor_class(
        do_resize=True,
        size={"height": section.size, "width": section.size},
        do_normalize=True,
        image_mean=list(section.mean),
        image_std=list(section.std),
    )


def with_image_size(processor: Any, size: int) -> Any:
    """Return the processor with that output size, resizing and cropping as before."""
    values = processor.to_dict()
    values["size"] = {"height": size, "width": size}
    size_values = dict(processor.size) if isinstance(processor.size, dict) else vars(processor.size)
    if size_values.get("shortest_edge") is not None:
        values["size"] = {"shortest_edge": size}
    if getattr(processor, "do_center_crop", None):
        values["crop_size"] = {"height": size, "width": size}
    return type(processor).from_dict(values)


def with_pixel_limits(processor: Any, images: ImagesSection) -> Any:
    """Return the image processor of a vision-language model with the section's limits; raises ModelError without any.

    Processors of the Qwen2-VL family call the limits of an image's area `shortest_edge` and `longest_edge`.
    """
    keys = {"shortest_edge": images.min_pixels, "longest_edge": images.max_pixels}
    limits = {key: pixels for key, pixels in keys.items() if pixels is not None}
    if not limits:
        return processor
    arguments = getattr(getattr(type(processor), "valid_kwargs", None), "__annotations__", {})
    if not {"min_pixels", "max_pixels"} <= set(arguments):
        sizes = {key: value for key, value in vars(processor.size).items() if value is not None}
        raise ModelError(
            f"data.images: {type(processor).__name__} has no limits of pixels: it resizes every image to {sizes}. "
            "Remove `min_pixels` and `max_pixels`."
        )
    values = processor.to_dict()
    values["size"] = {key: getattr(processor.size, key) for key in keys} | limits
    if values["size"]["shortest_edge"] > values["size"]["longest_edge"]:
        raise ModelError(
            f"data.images: the limits of the processor become {values['size']['shortest_edge']} to "
            f"{values['size']['longest_edge']} pixels. Write both `min_pixels` and `max_pixels`."
        )
    return type(processor).from_dict(values)


def check_image_shape(config: PreTrainedConfig, processor: Any) -> None:
    """Raise ModelError if the processor's image size or number of channels differs from the model's."""
    mean = getattr(processor, "image_mean", None)
    if not isinstance(mean, list | tuple):
        return
    num_channels, model_channels = len(mean), getattr(config, "num_channels", None)
    if model_channels not in (None, num_channels):
        raise ModelError(
            f"data.images: the model expects {model_channels} channels, but `mean` and `std` of the image processor "
            f"have {num_channels}. Write `num_channels: {num_channels}` in `model.from_config.values`, or one number "
            "per channel in `model.image_processor.mean` and `std`."
        )
    expected = getattr(config, "image_size", None)
    if expected is None or not hasattr(config, "patch_size"):  # models without patches accept any size
        return
    height, width = processed_image_size(processor, num_channels=num_channels)
    rows, columns = expected if isinstance(expected, list | tuple) else (expected, expected)
    if (height, width) != (rows, columns):
        raise ModelError(
            f"data.images: the model expects images of {rows} x {columns} pixels, but gets {height} x {width}. "
            f"Write `image_size: {height}` in `model.from_config.values`, or `data.images.size: {rows}`."
        )


def processed_image_size(processor: Any, *, num_channels: int) -> tuple[int, int]:
    """Return height and width of the processor's output for a square image."""
    blank = Image.new("L" if num_channels == 1 else "RGB", (64, 64))
    height, width = processor(blank, return_tensors="pt")["pixel_values"].shape[-2:]
    return int(height), int(width)


PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class Processing:
    """Tokenizer and processor of a model; image tasks have no tokenizer, text tasks no processor."""

    tokenizer: Any = None
    processor: Any = None

    def save(self, folder: Path) -> None:
        """Save both to the folder in transformers' format."""
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        if self.processor is not None:
            self.processor.save_pretrained(folder)

    @property
    def identity(self) -> dict[str, str]:
        """Return a digest of the image preprocessing; empty for text tasks."""
        if self.processor is None:
            return {}
        described = type(self.processor).__name__ + json.dumps(self.processor.to_dict(), sort_keys=True, default=str)
        return {"processor": hashlib.blake2b(described.encode(), digest_size=16).hexdigest()}


def load_processing(
    model: ModelSection,
    *,
    reads: InputKind,
    texts: Callable[[], Iterable[str]],
    cache_folder: Path,
    log: Callable[[str], None],
    images: ImagesSection = NO_CHANGES,
) -> Processing:
    """Return the tokenizer and processor for this input type and model, with the image sizes of the section.

    Raises ModelError.
    """
    if reads == "text":
        return Processing(load_tokenizer(model, texts=texts, cache_folder=cache_folder, log=log))
    if reads == "images":
        section = model.image_processor
        if section is not None and section.name is None:
            processor = build_image_processor(section)
        elif section is not None:
            named = model.model_copy(update={"name": section.name, "revision": None})
            processor = _load_pretrained(named, AutoImageProcessor, key="model.image_processor.name")
        elif model.name is not None:
            processor = _load_pretrained(model, AutoImageProcessor, key="model.name")
        else:
            raise ModelError(
                "model.image_processor: a model built `from_config` has no image processor. Write `size` or `name`."
            )
        return Processing(processor=processor if images.size is None else with_image_size(processor, images.size))
    processor = _load_pretrained(model, AutoProcessor, key="model.name")
    if getattr(processor, "tokenizer", None) is None:
        raise ModelError("model.name: its processor has no tokenizer. Use a model for images and text.")
    if hasattr(processor, "image_processor"):
        processor.image_processor = with_pixel_limits(processor.image_processor, images)
    if processor.chat_template:  # older repositories have it only in the processor
        processor.tokenizer.chat_template = processor.chat_template
    ensure_padding(processor.tokenizer, log=log)
    if model.new_tokens is not None:
        add_tokens(processor.tokenizer, model.new_tokens)
    return Processing(processor.tokenizer, processor)


def load_saved_processing(source: str | Path, *, reads: InputKind, key: str, trust_remote_code: bool) -> Processing:
    """Return the tokenizer and processor that `save` wrote to the folder, or the cached ones of a hub name.

    Raises ModelError, which names `key`, if they cannot be loaded.
    """
    auto_class = {"text": AutoTokenizer, "images": AutoImageProcessor, "both": AutoProcessor}[reads]
    with loading_errors(str(source), key=key), without_hub_retries(is_local=True):
        loaded = load_auto_class(auto_class, source, trust_remote_code=trust_remote_code, local_files_only=True)
        if reads == "text":
            return Processing(loaded)
        return Processing(None if reads == "images" else loaded.tokenizer, loaded)


def has_processing(folder: Path, *, reads: InputKind) -> bool:
    """Return whether the folder contains files of a tokenizer or processor, valid or not."""
    names = TOKENIZER_FILES if reads == "text" else PROCESSOR_FILES
    return any((folder / name).is_file() for name in names)


def _load_pretrained(model: ModelSection, auto_class: Any, *, key: str) -> Any:
    """Return the processor of `model.tokenizer.name`, or of the model if that is not set."""
    tokenizer = model.tokenizer
    name = tokenizer.name if tokenizer is not None and tokenizer.name is not None else model.name
    if name is None:
        raise ModelError("model.tokenizer: a model built `from_config` has no processor. Write `name`.")
    revision = model.revision if name == model.name else None
    return load_named(auto_class, name, key=key, section=model, revision=revision)
