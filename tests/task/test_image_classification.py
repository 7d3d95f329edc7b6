"""Image classification: what is stored, what the model is given, and that chance depends on step and sample alone."""

import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import ResNetConfig, ResNetForImageClassification

from finetune.config.sections.data import DataSection
from finetune.config.sections.model import ImageProcessorSection
from finetune.config.sections.task import TaskSection
from finetune.data.batch import IGNORED
from finetune.data.encoding.labelled import image_name
from finetune.data.features import Features
from finetune.data.images import StoredImage
from finetune.errors import DataError
from finetune.model.processing import build_image_processor
from finetune.task.classification import ImageClassificationTask
from finetune.task.protocol import TaskContext
from tests.refusals import pinned

CLASSES = ["a", "b", "c", "d", "e", "f"]


def png(seed: int, mode: str = "RGB") -> bytes:
    values = np.random.default_rng(seed).integers(0, 256, (10, 12, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(values).convert(mode).save(stream, "PNG")
    return stream.getvalue()


def row(number: int) -> dict:
    return {"image": StoredImage(f"photos/{number}.png", content=png(number)), "label": CLASSES[number % 6]}


def make_task(images: dict | None = None, **task) -> ImageClassificationTask:
    data = DataSection(train={"path": "photos"}, images=images or {})
    section = TaskSection(name="image_classification", **task)
    processor = build_image_processor(ImageProcessorSection(size=8))
    return ImageClassificationTask(
        TaskContext(section, data, processor=processor, rows=lambda: [row(number) for number in range(12)])
    )


@pytest.fixture(scope="module")
def model():
    config = ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic", num_labels=6)
    return ResNetForImageClassification(config).eval()


def features_of(task, *numbers: int) -> list[Features]:
    return [
        replace(each, sample_id=number)
        for number, each in zip(numbers, task.encode([row(number) for number in numbers]), strict=True)
    ]


def test_a_sample_is_one_label_and_the_encoded_bytes():
    task = make_task()
    (found,) = features_of(task, 7)
    assert found.length == found.num_targets == 1
    assert found.arrays["label"].tolist() == [1]
    assert found.arrays["image"].tobytes() == png(7)
    assert image_name(found) == "photos/7.png"
    assert task.head_values["id2label"] == dict(enumerate(CLASSES))
    json.dumps([task.data_facts.values, task.samples.identity])


def test_an_image_that_cannot_be_decoded_is_reported_by_name():
    broken = {"image": StoredImage("photos/broken.png", content=png(1)[:100]), "label": "a"}
    unknown = {"image": StoredImage("1.png", content=png(1)), "label": "z"}
    first, second = make_task().encode([broken, unknown])
    assert isinstance(first, DataError)
    pinned(first, "photos/broken.png")
    pinned(second, "`z`")


def test_an_evaluation_uses_the_images_of_the_processor(model):
    task = make_task({"crop_scale": [0.1, 0.5], "flip": True, "mixup": 1.0})
    batch = task.collate(features_of(task, 1, 2, 8))
    wanted = task.views.processor([Image.open(io.BytesIO(png(n))) for n in (1, 2, 8)], return_tensors="pt")
    torch.testing.assert_close(batch.inputs["pixel_values"], wanted["pixel_values"], atol=1e-6, rtol=0)
    assert batch.labels.tolist() == [1, 2, 2]
    assert batch.num_targets == batch.num_tokens == 3


@pytest.mark.parametrize("images", [{"crop_scale": [0.1, 1.0]}, {"crop_padding": 3, "flip": True}])
def test_views_depend_on_step_and_sample_and_not_on_the_batch(images):
    task = make_task(images)
    one, two, three = (replace(each, seed=5) for each in features_of(task, 1, 2, 3))
    together = task.collate([one, two, three]).inputs["pixel_values"]
    apart = torch.cat([task.collate([each]).inputs["pixel_values"] for each in (one, two, three)])
    assert torch.equal(together, apart)
    later = task.collate([replace(each, seed=6) for each in (one, two, three)]).inputs["pixel_values"]
    assert not torch.equal(together, later)


@pytest.mark.parametrize("images", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0, "flip": True}])
def test_mixed_images_have_mixed_labels_in_any_batch(images, model):
    task = make_task(images)
    one, two, partner = (replace(each, seed=5) for each in features_of(task, 1, 2, 3))
    mixed = [replace(one, partner=partner), replace(two, partner=partner)]
    batch = task.collate(mixed)
    assert torch.equal(batch.labels, torch.cat([task.collate([each]).labels for each in mixed]))
    shares = batch.labels[0]
    assert shares.sum().item() == pytest.approx(1.0)
    assert set(shares.nonzero().flatten().tolist()) <= {1, 3}
    logits = model(**batch.inputs).logits.double().log_softmax(dim=-1)
    assert task.loss_sums(model, batch)["loss_sum"].item() == pytest.approx(
        -(logits * batch.labels).sum().item(), rel=1e-5
    )


def test_the_loss_is_the_weighted_smoothed_cross_entropy(model):
    task = make_task(label_smoothing=0.1, classification={"labels": CLASSES, "class_weights": [1, 2, 3, 1, 1, 1]})
    batch = task.collate(features_of(task, 0, 1, 2))
    logits = model(**batch.inputs).logits
    wanted = cross_entropy(
        logits, batch.labels, weight=torch.tensor([1.0, 2, 3, 1, 1, 1]), label_smoothing=0.1, reduction="sum"
    )
    assert task.loss_sums(model, batch)["loss_sum"].item() == pytest.approx(wanted.item())
    plain = cross_entropy(logits, batch.labels, reduction="sum")
    assert task.evaluate_batch(model, batch).sums["loss_sum"].item() == pytest.approx(plain.item(), rel=1e-5)


class Answers(nn.Module):
    """Gives logits that are handed in."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.tensor(logits)

    def forward(self, pixel_values):
        return self


def test_metrics_are_accuracy_macro_f1_and_top_5():
    task = make_task()
    batch = task.collate(features_of(task, 0, 1, 2, 3))
    answers = Answers(
        [
            [9.0, 1, 2, 3, 4, 5],  # right
            [9.0, 8, 2, 3, 4, 5],  # the second likeliest
            [9.0, 8, 1, 3, 4, 5],  # the least likely
            [1.0, 2, 3, 9, 4, 5],  # right
        ]
    )
    measured = task.evaluate_batch(answers, batch)
    sums = {name: value.item() for name, value in measured.sums.items()}
    metrics = task.metrics(sums, measured.records)
    assert metrics["accuracy"] == 0.5
    assert metrics["top5_accuracy"] == 0.75
    assert metrics["macro_f1"] == pytest.approx((0.5 + 0 + 0 + 1) / 4)  # of a: one of three right
    assert metrics["loss"] == pytest.approx(sums["loss_sum"] / 4)


def test_a_filler_counts_nothing(model):
    task = make_task({"mixup": 0.2})
    filler = task.dummy_batch(features_of(task, 1)[0])
    assert filler.labels.tolist() == [IGNORED]
    measured = task.evaluate_batch(model, filler)
    assert measured.sums["loss_sum"].item() == 0.0
    assert measured.sums["num_targets"].item() == 0
    assert measured.records is None


def test_a_model_in_half_precision_is_given_its_own_type(model):
    task = make_task()
    half = ResNetForImageClassification(model.config).to(torch.bfloat16).eval()
    loss = task.loss_sums(half, task.collate(features_of(task, 0, 1)))["loss_sum"]
    assert loss.dtype == torch.float32
    assert math.isfinite(loss.item())
