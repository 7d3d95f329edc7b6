"""`vision_language_sft` on colored squares: a tiny LLaVA, rows with no image, with one and with two."""

import json
import random
from pathlib import Path

import torch
from PIL import Image
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageTextToText, AutoProcessor, CLIPImageProcessor, LlavaProcessor

from tests.small_models import byte_tokenizer
from tests.task_cases.case import Case

COLOURS = ["red", "green", "blue", "yellow", "white", "black"]
TEMPLATE = (
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n"
    "{% for part in turn.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASSISTANT = "<|im_start|>assistant\n"

LLAVA = """
  from_config:
    model_type: llava
    values:
      text_config:
        {model_type: llama, hidden_size: 48, intermediate_size: 96, num_hidden_layers: 2, num_attention_heads: 4,
         num_key_value_heads: 2, max_position_embeddings: 256}
      vision_config:
        {model_type: clip_vision_model, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
         num_attention_heads: 4, image_size: 16, patch_size: 8}
  tokenizer: {name: ./processor}
"""

JOB = f"""
run: {{folder: runs/vision_language_sft, seed: 7}}
model: {LLAVA}
data: {{train: {{path: train.jsonl}}, validation: {{path: held_out.jsonl}}, max_length: 128}}
task: {{name: vision_language_sft}}
train: {{global_batch_size: 8, microbatch_size: 1, steps: 4, learning_rate: 1e-2}}
evaluate: {{generate: {{num_samples: 3, max_new_tokens: 4}}}}
report: {{console: plain}}
"""


def write(folder: Path) -> None:
    """Write a processor, and rows with no, one and two images; some microbatches hold no image on one rank alone."""
    processor().save_pretrained(folder / "processor")
    chance = random.Random(3)
    for name, count in (("train.jsonl", 50), ("held_out.jsonl", 7)):
        rows = [row(chance, folder, f"{name[:4]}-{number}") for number in range(count)]
        (folder / name).write_text("".join(json.dumps(each) + "\n" for each in rows))


def row(chance: random.Random, folder: Path, name: str) -> dict:
    """Return a question for the colors of up to two squares, or for a word repeated, and write the squares."""
    colors = chance.choices(COLOURS, k=chance.randint(0, 2))
    paths = []
    for number, color in enumerate(colors):
        paths.append(f"{name}-{number}.png")
        Image.new("RGB", (chance.randint(16, 40), 24), color).save(folder / paths[-1])
    asked = "which colors?" if colors else f"say {chance.choice(COLOURS)}"
    answer = " and ".join(colors) or asked.removeprefix("say ")
    content = [*({"type": "image"} for _ in colors), {"type": "text", "text": asked}]
    turns = [{"role": "user", "content": content if colors else asked}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "images": paths}


def processor() -> LlavaProcessor:
    """Return LLaVA's processor with a byte-level tokenizer and images of 16 x 16 pixels, 4 tokens each."""
    texts = [*COLOURS, "which colors? say and user assistant"] * 4
    special = ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>", "<image>"]
    named = {"pad_token": special[1], "additional_special_tokens": special[2:]}
    tokenizer = byte_tokenizer(texts, special=special, size=320, **named)
    size = {"height": 16, "width": 16}
    pixels = CLIPImageProcessor(size=size, crop_size=size)
    return LlavaProcessor(
        pixels,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def loss_of_answers(final: Path, folder: Path) -> float:
    """Return the mean loss over the answers' tokens and the one that ends each, a row at a time."""
    model, reader = AutoModelForImageTextToText.from_pretrained(final), AutoProcessor.from_pretrained(final)
    total, count = 0.0, 0
    for line in (folder / "held_out.jsonl").read_text().splitlines():
        each = json.loads(line)
        content = each["messages"][0]["content"]
        content = [{"type": "text", "text": content}] if isinstance(content, str) else content
        asked = reader.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        images = [Image.open(folder / path).convert("RGB") for path in each["images"]] or None
        text = asked + each["messages"][1]["content"] + "<|im_end|>"
        start = reader(text=[asked], images=images, return_tensors="pt")["input_ids"].shape[1]
        inputs = reader(text=[text], images=images, return_tensors="pt")
        with torch.no_grad():
            logits = model.eval()(**inputs).logits[0, start - 1 : -1]
        wanted = inputs["input_ids"][0, start:]
        total += cross_entropy(logits.double(), wanted, reduction="sum").item()
        count += len(wanted)
    return total / count


CASES = (Case("vision_language_sft", JOB, write, "loss", loss_of_answers),)
