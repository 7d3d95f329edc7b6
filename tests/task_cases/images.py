"""`image_classification`: colored shapes; a model without batch norms, and one with them in both of their ways."""

import random
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from PIL import Image, ImageDraw
from torch.nn.functional import cross_entropy
from transformers import AutoImageProcessor, AutoModelForImageClassification

from tests.task_cases.case import Case

CLASSES = ("disc", "square", "stripe")

VIT = """
  from_config:
    model_type: vit
    values:
      {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, image_size: 16,
       patch_size: 8, hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0}
  image_processor: {size: 16}
"""

RESNET = """
  from_config:
    model_type: resnet
    values: {embedding_size: 8, hidden_sizes: [8, 16], depths: [1, 1], layer_type: basic}
  image_processor: {size: 16}
"""

REST = """
task: {name: image_classification}
train: {global_batch_size: 8, microbatch_size: 2, steps: 4, learning_rate: 1e-2}
evaluate: {}
report: {console: plain}
"""

PLAIN = f"""
run: {{folder: runs/images, seed: 7}}
model: {VIT}
data: {{train: {{path: train}}, validation: {{path: held_out}}}}
{REST}
"""

MIXED = f"""
run: {{folder: runs/images-mixed, seed: 7}}
model: {RESNET}
  batch_norm: frozen
data:
  train: {{path: train}}
  validation: {{path: held_out}}
  images: {{crop_padding: 2, flip: true, mixup: 0.2, cutmix: 1.0}}
{REST}
"""

GROUPED = f"""
run: {{folder: runs/images-norms, seed: 7}}
model: {RESNET}
  batch_norm: 2
data:
  train: {{path: train}}
  validation: {{path: held_out}}
  images: {{crop_scale: [0.5, 1.0], flip: true}}
{REST}
"""


def shapes(folder: Path) -> None:
    """Write shapes in random colors and places into a folder for each class, 20 x 24 pixels and larger."""
    chance = random.Random(4)
    for part, count in (("train", 30), ("held_out", 9)):
        for number in range(count):
            label = CLASSES[number % len(CLASSES)]
            (folder / part / label).mkdir(parents=True, exist_ok=True)
            _shape(label, chance).save(folder / part / label / f"{number}.png")


def measured_again(final: Path, folder: Path) -> float:
    """Return the mean loss over the held-out images, each by itself."""
    is_adapter = (final / "adapter_config.json").exists()
    model: Any = AutoModelForImageClassification.from_pretrained(final / "base" if is_adapter else final)
    model = PeftModel.from_pretrained(model, final) if is_adapter else model
    processor = AutoImageProcessor.from_pretrained(final)
    losses = []
    for path in sorted((folder / "held_out").rglob("*.png")):
        inputs: Any = processor(Image.open(path).convert("RGB"), return_tensors="pt")
        with torch.no_grad():
            logits = model.eval()(**inputs).logits
        wanted = torch.tensor([model.config.label2id[path.parent.name]])
        losses.append(cross_entropy(logits.double(), wanted).item())
    return sum(losses) / len(losses)


def _shape(label: str, chance: random.Random) -> Image.Image:
    width, height = chance.randint(20, 28), chance.randint(20, 28)
    image = Image.new("RGB", (width, height), tuple(chance.randint(0, 80) for _ in range(3)))
    draw = ImageDraw.Draw(image)
    left, top, size = chance.randint(0, 8), chance.randint(0, 8), chance.randint(8, 12)
    color = tuple(chance.randint(150, 255) for _ in range(3))
    if label == "disc":
        draw.ellipse((left, top, left + size, top + size), fill=color)
    elif label == "square":
        draw.rectangle((left, top, left + size, top + size), fill=color)
    else:
        draw.line((left, top, left + size, top + size), fill=color, width=3)
    return image


FULL: dict[str, tuple[str, ...]] = {"full": ()}

CASES = (
    Case("images", PLAIN, shapes, "loss", measured_again),
    Case("images-mixed", MIXED, shapes, "loss", measured_again, variants=FULL),
    Case("images-norms", GROUPED, shapes, "loss", measured_again, variants=FULL),
)
