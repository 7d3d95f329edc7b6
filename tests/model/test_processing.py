"""Image processors: of new models, with other sizes, and checked against their model."""

import pytest
import transformers
from PIL import Image
from transformers import AutoImageProcessor, ResNetConfig, ViTConfig

from finetune.config.sections.data import ImagesSection
from finetune.config.sections.model import ImageProcessorSection
from finetune.errors import ModelError
from finetune.model.processing import (
    build_image_processor,
    check_image_shape,
    with_image_size,
    with_pixel_limits,
)
from tests.data.picture_processors import qwen, smolvlm
from tests.refusals import refused


def output_size(processor, mode="RGB"):
    return tuple(processor(Image.new(mode, (64, 64)), return_tensors="pt")["pixel_values"].shape[-2:])


def test_a_built_processor_has_one_channel_or_three_and_can_be_loaded_again(tmp_path):
    processor = build_image_processor(ImageProcessorSection(size=8, mean=(0.3,), std=(0.4,)))
    assert output_size(processor, "L") == (8, 8)
    processor.save_pretrained(tmp_path)
    assert AutoImageProcessor.from_pretrained(tmp_path).to_dict() == processor.to_dict()
    with refused(ModelError, "`mean`", "1", "`std` 3"):
        build_image_processor(ImageProcessorSection(size=8, mean=(0.3,)))


@pytest.mark.parametrize(
    "processor",
    [
        transformers.ViTImageProcessor(),
        transformers.ConvNextImageProcessor(size={"shortest_edge": 224}),
        transformers.CLIPImageProcessor(),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_changed_image_size_is_produced_by_the_processor(processor):
    smaller = with_image_size(processor, 20)
    assert output_size(smaller) == (20, 20)
    assert smaller.image_mean == processor.image_mean
    assert output_size(processor) == (224, 224)


def test_pixel_limits_bound_the_tokens_of_an_image_and_are_saved_with_the_processor(tmp_path):
    image = Image.new("RGB", (280, 280))
    usual = qwen().image_processor
    limited = with_pixel_limits(usual, ImagesSection(max_pixels=4 * 28 * 28))
    assert usual(image, return_tensors="np")["image_grid_thw"].tolist() == [[1, 8, 8]]  # 16 tokens of 2 x 2 patches
    assert limited(image, return_tensors="np")["image_grid_thw"].tolist() == [[1, 4, 4]]
    small = Image.new("RGB", (28, 28))
    enlarged = with_pixel_limits(usual, ImagesSection(min_pixels=4 * 28 * 28))
    assert enlarged(small, return_tensors="np")["image_grid_thw"].tolist() == [[1, 4, 4]]
    limited.save_pretrained(tmp_path)
    assert AutoImageProcessor.from_pretrained(tmp_path).size.longest_edge == 4 * 28 * 28
    assert with_pixel_limits(usual, ImagesSection()) is usual


def test_pixel_limits_of_a_processor_without_any_are_refused_by_name():
    with refused(ModelError, "Idefics3ImageProcessor", "'longest_edge': 32", varies=True):
        with_pixel_limits(smolvlm().image_processor, ImagesSection(max_pixels=1000))
    with refused(ModelError, "784 to 100 pixels"):
        with_pixel_limits(qwen().image_processor, ImagesSection(max_pixels=100))


def test_image_size_and_channels_must_match_the_model():
    processor = build_image_processor(ImageProcessorSection(size=32))
    check_image_shape(ViTConfig(image_size=32), processor)
    check_image_shape(ResNetConfig(), processor)
    check_image_shape(ViTConfig(), None)
    with refused(ModelError, "224 x 224", "32 x 32", "`image_size: 32`"):
        check_image_shape(ViTConfig(), processor)
    with refused(ModelError, "1 channels", "`mean`", "`std`", "`num_channels: 3`"):
        check_image_shape(ResNetConfig(num_channels=1), processor)
