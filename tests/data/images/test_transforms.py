"""Pixels are those of the model's own processor; what is drawn depends on the chance that is handed in alone."""

from random import Random

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from finetune.config.sections.data import ImagesSection
from finetune.data.images.transforms import ImageTransform, mix_images, pad_and_crop, random_crop_box
from finetune.errors import DataError

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    return Image.fromarray(np.random.default_rng(3).integers(0, 256, shape, np.uint8))


PROCESSORS = {
    "vit": lambda: transformers.ViTImageProcessor(size={"height": 24, "width": 24}, image_mean=MEAN, image_std=STD),
    "grey": lambda: transformers.ViTImageProcessor(size={"height": 8, "width": 8}, image_mean=[0.3], image_std=[0.4]),
    "resnet": lambda: transformers.ConvNextImageProcessor(size={"shortest_edge": 28}, crop_pct=0.875),
    "clip": lambda: transformers.CLIPImageProcessor(size={"shortest_edge": 20}, crop_size={"height": 16, "width": 16}),
}


@pytest.fixture(params=PROCESSORS)
def processor(request):
    return PROCESSORS[request.param]()


def test_evaluation_images_equal_the_output_of_the_processor(processor):
    views = ImageTransform(processor, ImagesSection())
    image = noise(37, 29, views.mode)
    wanted = processor(image, return_tensors="pt")["pixel_values"][0].float()
    torch.testing.assert_close(views.plain(image), wanted, atol=1e-6, rtol=0)
    assert wanted.shape == (1 if views.mode == "L" else 3, *views.size)
    torch.testing.assert_close(views.augmented(image, Random(1)), wanted, atol=1e-6, rtol=0)


def test_the_whole_image_cut_and_mirrored_is_normalized_alike(processor):
    views = ImageTransform(processor, ImagesSection(flip=True))
    image = noise(37, 29, views.mode)
    plain = views.plain(image)
    drawn = [views.augmented(image, Random(seed)) for seed in range(8)]
    mirrored = [seed for seed, each in enumerate(drawn) if not torch.allclose(each, plain, atol=1e-6)]
    assert 0 < len(mirrored) < 8
    torch.testing.assert_close(drawn[mirrored[0]].flip(-1), plain, atol=1e-6, rtol=0)


def test_a_drawn_part_has_the_size_and_depends_on_chance_alone(processor):
    views = ImageTransform(processor, ImagesSection(crop_scale=(0.1, 1.0), flip=True))
    image = noise(37, 29, views.mode)
    one, again, other = (views.augmented(image, Random(seed)) for seed in (1, 1, 2))
    assert one.shape == views.plain(image).shape
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_the_whole_area_is_the_whole_image():
    views = ImageTransform(PROCESSORS["vit"](), ImagesSection(crop_scale=(1.0, 1.0)))
    image = noise(24, 24)
    assert any(torch.allclose(views.augmented(image, Random(seed)), views.plain(image), atol=1e-6) for seed in range(9))


def test_a_random_part_lies_within_and_has_a_share_of_the_area():
    chance = Random(5)
    for _ in range(200):
        left, top, right, bottom = random_crop_box((40, 30), (0.2, 0.5), chance)
        assert 0 <= left < right <= 40
        assert 0 <= top < bottom <= 30
        assert 0.15 < (right - left) * (bottom - top) / 1200 < 0.55
    assert random_crop_box((100, 1), (1.0, 1.0), chance) == (49, 0, 50, 1)  # nothing fits: the center


def test_a_shifted_image_has_black_where_nothing_was():
    image = Image.new("L", (3, 3), 255)
    found = {tuple(np.asarray(pad_and_crop(image, 1, Random(seed))).ravel()) for seed in range(60)}
    assert len(found) == 9  # three places by three
    assert (255,) * 9 in found


def test_a_processor_whose_sizes_depend_on_the_image_is_refused():
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 20}, do_center_crop=False)
    with pytest.raises(DataError, match=r"cannot be batched. Write `data.images.size`"):
        _ = ImageTransform(processor, ImagesSection()).size


def test_two_channels_are_refused():
    processor = transformers.ViTImageProcessor(image_mean=[0.5, 0.5], image_std=[0.5, 0.5])
    with pytest.raises(DataError, match="2 channels"):
        _ = ImageTransform(processor, ImagesSection()).mode


ONE, OTHER = torch.zeros(1, 8, 6), torch.ones(1, 8, 6)


def test_mixup_blends_every_pixel_by_the_share():
    for seed in range(20):
        mixed = mix_images(ONE, OTHER, mixup=0.4, cutmix=0.0, random=Random(seed))
        assert torch.equal(mixed.pixels, torch.full_like(ONE, 1 - mixed.share))


def test_cutmix_replaces_the_share_of_pixels_it_reports():
    shares = set()
    for seed in range(50):
        mixed = mix_images(ONE, OTHER, mixup=0.0, cutmix=1.0, random=Random(seed))
        assert mixed.pixels.mean().item() == pytest.approx(1 - mixed.share, abs=1e-6)
        assert set(mixed.pixels.unique().tolist()) <= {0.0, 1.0}
        shares.add(mixed.share)
    assert len(shares) > 15
    assert ONE.sum() == 0  # what was handed in is left as it was


def test_mixup_and_cutmix_are_both_drawn_when_both_are_enabled():
    kinds = {
        len(mix_images(ONE, OTHER, mixup=1.0, cutmix=1.0, random=Random(seed)).pixels.unique()) for seed in range(30)
    }
    assert kinds == {1, 2}
