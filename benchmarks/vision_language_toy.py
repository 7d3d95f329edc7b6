"""Whether a model learns to see: the answer is the colour of a square, which the image alone tells.

    python benchmarks/vision_language_toy.py [--steps 200]

A tiny LLaVA from random weights learns from 400 squares of 6 colours and is asked about 60 others; prints the share of
right answers at each evaluation. Exits 1 where the last is not above 0.9.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

from PIL import Image

from finetune.config.load import load_config
from finetune.report.jsonl import read_events
from finetune.run.train import train_from_config

from task_cases.vision_language import COLOURS, LLAVA, processor

JOB = f"""
run: {{folder: runs/toy, seed: 1}}
model: {LLAVA}
data: {{train: {{path: train.jsonl}}, validation: {{path: held_out.jsonl}}, max_length: 128}}
task: {{name: vision_language_sft}}
train: {{global_batch_size: 16, microbatch_size: 16, steps: 200, learning_rate: 3e-3, schedule: {{name: constant}}}}
evaluate: {{every_steps: 50, generate: {{num_samples: 60, max_new_tokens: 6, show: 0}}}}
checkpoint: {{every_steps: 200}}
report: {{console: plain, log_every_steps: 50}}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder)
        loaded = load_config(folder / "job.yaml", [f"train.steps={options.steps}", f"data.cache_folder={folder}/cache"])
        train_from_config(loaded)
        events = [event for event in read_events(folder / "runs/toy/events.jsonl") if event["event"] == "Evaluated"]
    for event in events:
        metrics = event["metrics"]
        print(f"step {event['step']:>4}  exact match {metrics['exact_match']:.3f}  loss {metrics['loss']:.4f}")
    return 0 if events[-1]["metrics"]["exact_match"] > 0.9 else 1


def write(folder: Path) -> None:
    """Write the processor, the job and rows whose question is always the same."""
    processor().save_pretrained(folder / "processor")
    (folder / "job.yaml").write_text(JOB)
    chance = random.Random(5)
    for name, count in (("train", 400), ("held_out", 60)):
        rows = [_row(chance, folder, f"{name}-{number}.png") for number in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _row(chance: random.Random, folder: Path, name: str) -> dict:
    """Return the question and write a square of some colour, size and place on a grey ground."""
    colour = chance.choice(COLOURS)
    image = Image.new("RGB", (32, 32), (120, 120, 120))
    size = chance.randint(14, 24)
    image.paste(Image.new("RGB", (size, size), colour), (chance.randint(0, 32 - size), chance.randint(0, 32 - size)))
    image.save(folder / name)
    return {"prompt": "<image>which colours?", "completion": colour, "images": [name]}


if __name__ == "__main__":
    sys.exit(main())
