"""Image processors for new models, other sizes, and whether they fit their model."""

import pytest
import transformers
from transformers import AutoImageProcessor, ResNetConfig, ViTConfig

from finetune.config.sections.model import ImageProcessorSection
from finetune.errors import ModelError
from finetune.model.processing import build_image_processor, check_image_shape, processed_image_size, with_image_size


def test_a_built_processor_has_one_channel_or_three_and_can_be_loaded_again(tmp_path):
    processor = build_image_processor(ImageProcessorSection(size=8, mean=(0.3,), std=(0.4,)))
    assert processed_image_size(processor, num_channels=1) == (8, 8)
    processor.save_pretrained(tmp_path)
    assert AutoImageProcessor.from_pretrained(tmp_path).to_dict() == processor.to_dict()
    with pytest.raises(ModelError, match="`mean` has 1 numbers and `std` 3"):
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
    assert processed_image_size(smaller, num_channels=3) == (20, 20)
    assert smaller.image_mean == processor.image_mean
    assert processed_image_size(processor, num_channels=3) == (224, 224)


def test_a_model_of_patches_wants_its_size_and_any_model_its_channels():
    processor = build_image_processor(ImageProcessorSection(size=32))
    check_image_shape(ViTConfig(image_size=32), processor)
    check_image_shape(ResNetConfig(), processor)
    check_image_shape(ViTConfig(), None)
    with pytest.raises(ModelError, match=r"expects images of 224 x 224 .* gets 32 x 32. Write `image_size: 32`"):
        check_image_shape(ViTConfig(), processor)
    with pytest.raises(
        ModelError,
        match=r"expects 1 channels, but `mean` and `std` of the image processor have 3.*Write `num_channels: 3`",
    ):
        check_image_shape(ResNetConfig(num_channels=1), processor)
