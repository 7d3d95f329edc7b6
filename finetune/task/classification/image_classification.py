"""Image classification: one class per image. Images are decoded in collation, in the loader's workers."""

from collections.abc import Mapping, Sequence
from random import Random

import torch
from torch import Tensor, nn

from finetune.config.sections.data import ImagesSection
from finetune.data.batch import IGNORED, Batch
from finetune.data.encoding.labelled import IMAGE, LABEL, LabelledImageEncoder
from finetune.data.features import Features
from finetune.data.images import ImageTransform, decode_image, mix_images
from finetune.runtime.seeds import derive_seed
from finetune.task.classification.classes import class_loss_sum, find_classes
from finetune.task.metrics import TOP_K, class_metrics
from finetune.task.model_inputs import unwrap_model
from finetune.task.protocol import BaseTask, EvaluationOutput, TaskContext


class ImageClassificationTask(BaseTask):
    """Predict the class of an image.

    Rows become `label` (the number of the class) and `image` (encoded bytes).
    """

    head = "image_classification"
    _loading_cost = "heavy"

    def __init__(self, context: TaskContext) -> None:
        self.section: ImagesSection = context.data.images
        self.label_smoothing = context.section.label_smoothing
        self.views = ImageTransform(context.processor, self.section)
        self.classification = find_classes(context, lambda row: (row["label"],))
        self.head_values, self.data_facts = self.classification.head_values, self.classification.data_facts
        self._encoder = LabelledImageEncoder(self.classification.classes, self.views.mode)
        self._has_partners = self.section.mixup > 0 or self.section.cutmix > 0  # each image is mixed with another one
        self._identity = {"labels": list(self.classification.classes.names), "mode": self.views.mode}
        _ = self.views.size  # raises here, before any data is prepared

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return the images as pixels; in training, augmented views that depend only on step and sample."""
        pairs = [self._pixels_and_label(sample) for sample in features]
        labels = torch.stack([label for _, label in pairs])
        return Batch(
            inputs={"pixel_values": torch.stack([pixels for pixels, _ in pairs])},
            labels=labels,
            num_targets=len(features),
            num_tokens=len(features),
            sample_ids=tuple(sample.sample_id for sample in features),
        )

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the cross-entropy in nats summed over the images, with class weights and label smoothing."""
        weights = self.classification.weight_tensor(batch.labels.device)
        logits, smoothing = image_logits(model, batch), self.label_smoothing
        loss_sum = class_loss_sum(logits, batch.labels, weights=weights, label_smoothing=smoothing)
        return {"loss_sum": loss_sum}

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> EvaluationOutput:
        """Return the sums, and each image's id, class, most likely class, and number of classes with higher logits."""
        logits, labels = image_logits(model, batch).float(), batch.labels
        sums = {"loss_sum": class_loss_sum(logits, labels), "num_targets": (labels != IGNORED).sum()}
        if not batch.sample_ids:
            return EvaluationOutput(sums)
        own = logits.gather(1, labels[:, None])  # [batch, 1]
        likelier = (logits > own).sum(dim=1)
        ids = torch.tensor(batch.sample_ids, dtype=torch.float64)
        columns = [column.to("cpu", torch.float64) for column in (labels, logits.argmax(dim=1), likelier)]
        return EvaluationOutput(sums, torch.stack([ids, *columns], dim=1))

    def metrics(self, sums: Mapping[str, float], records: Tensor | None = None) -> Mapping[str, float]:
        """Return `loss`, `accuracy`, `macro_f1` and, with more than 5 classes, `top5_accuracy`."""
        loss = sums["loss_sum"] / sums["num_targets"]
        if records is None:
            return {"loss": loss}
        num_classes = len(self.classification.classes)
        all_metrics = class_metrics(records[:, 1], records[:, 2], num_classes=num_classes)
        metrics = {name: all_metrics[name] for name in ("accuracy", "macro_f1")}
        if num_classes > TOP_K:
            metrics["top5_accuracy"] = (records[:, 3] < TOP_K).double().mean().item()
        return {"loss": loss, **metrics}

    def _pixels_and_label(self, features: Features) -> tuple[Tensor, Tensor]:
        """Return the pixels and the class index, or with a partner, the probabilities of all classes."""
        own, label = self._view(features, "own"), int(features.arrays[LABEL][0])
        if features.seed == 0 or not self._has_partners:
            return own, torch.tensor(label)
        partner = features.partner or features
        other, other_label = self._view(partner, "partner"), int(partner.arrays[LABEL][0])
        chance = Random(derive_seed(features.seed, features.sample_id, "mix"))
        mixed = mix_images(own, other, mixup=self.section.mixup, cutmix=self.section.cutmix, random=chance)
        probabilities = torch.zeros(len(self.classification.classes))
        probabilities[label] += mixed.share
        probabilities[other_label] += 1 - mixed.share
        return mixed.pixels, probabilities

    def _view(self, features: Features, role: str) -> Tensor:
        image = decode_image(features.arrays[IMAGE].tobytes(), mode=self.views.mode)
        if features.seed == 0:
            return self.views.plain(image)
        return self.views.augmented(image, Random(derive_seed(features.seed, features.sample_id, "view", role)))


def image_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits, [batch, classes]; pixels are cast to the dtype of the weights, which some models do not do."""
    pixels = batch.inputs["pixel_values"]
    dtype = getattr(unwrap_model(model), "dtype", None)
    logits: Tensor = model(pixel_values=pixels if dtype is None else pixels.to(dtype)).logits
    return logits
