"""Predicts the peak memory of a step, and measures it in real processes: by live bytes, on CPUs over gloo.

    python benchmarks/plan_memory.py                    # all; about ten minutes on two cores
    python benchmarks/plan_memory.py --only small/ddp/full small/zero3/lora/recomputed

Prints a table in Markdown, and writes it to benchmarks/experiments/plan_memory.md. Ends with 1 where a prediction is
more than 15% from what was measured, or the median more than 7%.

What is measured is what tensors hold at most in the second step or later: weights, gradients, optimizer state,
activations and buffers, of the rank that holds most. Two ranks; `single`: one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from finetune.config.load import load_config  # noqa: E402  # found by the line above
from finetune.memory.predict import Predictor  # noqa: E402
from finetune.memory.state import Layout  # noqa: E402
from finetune.run.setup.padding_free import resolve_padding_free  # noqa: E402
from tests.launching import accelerate_command  # noqa: E402

TARGET = ROOT / "benchmarks" / "experiments" / "plan_memory.md"
MAX_ERROR, MAX_MEDIAN = 0.15, 0.07
STRATEGIES = ("single", "ddp", "fsdp2", "zero2", "zero3")
METHODS = {"full": (), "lora": ("model.lora={rank: 8, alpha: 16}",)}

LLAMA = "tie_word_embeddings: false, num_attention_heads: 8, num_key_value_heads: 4"
SIZES = {
    "small": f"{{hidden_size: 256, intermediate_size: 704, num_hidden_layers: 6, vocab_size: 2048, {LLAMA}}}",
    "medium": f"{{hidden_size: 512, intermediate_size: 1408, num_hidden_layers: 8, vocab_size: 8192, {LLAMA}}}",
}
LENGTH, MICROBATCH = 256, 2

JOB = """
run: {{folder: {folder}/run, seed: 7}}
model:
  from_config: {{model_type: llama, values: {values}}}
  tokenizer: {{train: {{vocabulary_size: 300}}}}
data:
  train: {{path: {folder}/rows.jsonl}}
  max_length: {length}
  over_length: truncate
  cache_folder: {folder}/cache
task: {{name: pretrain}}
train: {{global_batch_size: {batch}, microbatch_size: {microbatch}, steps: 3, learning_rate: 1.0e-3}}
checkpoint: {{every_steps: null}}
report: {{console: plain}}
export: {{verify: false}}
"""


@dataclass(frozen=True)
class Combination:
    """A job under a strategy."""

    size: str
    strategy: str
    method: str
    recomputes: bool

    @property
    def name(self) -> str:
        """Return what `--only` calls it."""
        return "/".join([self.size, self.strategy, self.method, *(["recomputed"] if self.recomputes else [])])

    @property
    def num_ranks(self) -> int:
        """Return the number of processes."""
        return 1 if self.strategy == "single" else 2

    @property
    def overrides(self) -> tuple[str, ...]:
        """Return what is set in the job."""
        return (*METHODS[self.method], f"model.gradient_checkpointing={str(self.recomputes).lower()}")


COMBINATIONS = tuple(
    Combination(size, strategy, method, recomputes=(size == "medium") == (method == "full"))
    for size, strategy, method in product(SIZES, STRATEGIES, METHODS)
)
"""Recomputation with full fine-tuning in one size, with LoRA in the other."""


def main() -> int:
    """Measure what is asked for, print and write the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[each.name for each in COMBINATIONS], metavar="NAME")
    parser.add_argument("--results", type=Path, help="JSON lines: what is in there is not measured again")
    options = parser.parse_args()
    chosen = [each for each in COMBINATIONS if each.name in options.only]
    rows = [(each, *figures) for each, figures in measured_before(options.results)]
    known = {each for each, *_ in rows}
    with tempfile.TemporaryDirectory(prefix="plan-memory-") as scratch:
        for number, each in enumerate(each for each in chosen if each not in known):
            rows.append(compare(each, Path(scratch) / str(number), MICROBATCH))
            if options.results:
                with options.results.open("a") as file:
                    file.write(json.dumps([each.name, *rows[-1][1:]]) + "\n")
    rows.sort(key=lambda row: COMBINATIONS.index(row[0]))
    errors = [abs(row[-1]) for row in rows]
    text = format_table(rows, errors)
    print(text)
    if len(rows) == len(COMBINATIONS):
        TARGET.write_text(text)
    return 0 if max(errors) <= MAX_ERROR and statistics.median(errors) <= MAX_MEDIAN else 1


def measured_before(results: Path | None) -> list[tuple[Combination, list[Any]]]:
    """Return the combinations of an earlier run, each with its figures."""
    lines = results.read_text().splitlines() if results is not None and results.exists() else []
    by_name = {each.name: each for each in COMBINATIONS}
    return [(by_name[name], figures) for name, *figures in map(json.loads, lines)]


def compare(each: Combination, folder: Path, microbatch: int) -> tuple[Combination, int, int, float, float]:
    """Return the predicted and the measured peak in bytes, the seconds of the prediction, and the relative error."""
    path = write_job(each, folder, microbatch=microbatch)
    measured = measure(each, path)
    started = time.perf_counter()
    layout = Layout(
        each.strategy,  # type: ignore[arg-type]
        each.num_ranks,
        each.method,  # type: ignore[arg-type]
        each.recomputes,
        microbatch_size=microbatch,
        device="cpu",
    )
    config = load_config(path, each.overrides).config
    predicted = Predictor(config, resolve_padding_free(config)).predict(layout)
    seconds = time.perf_counter() - started
    error = predicted.peak_bytes / measured - 1
    print(
        f"{each.name:32} predicted {predicted.peak_bytes / 1e6:8.1f} MB, measured {measured / 1e6:8.1f} MB, "
        f"{error:+.1%}  { ({name: round(size / 1e6, 1) for name, size in predicted.parts.items()}) }",
        flush=True,
    )
    return each, predicted.peak_bytes, measured, seconds, error


def write_job(each: Combination, folder: Path, *, microbatch: int) -> Path:
    """Write a job of rows that are all as long as they may be, and return its path."""
    folder.mkdir(parents=True)
    text = "the quick brown fox jumps over the lazy dog " * LENGTH
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": f"{n} {text}"}) + "\n" for n in range(8)))
    batch = each.num_ranks * microbatch
    job = JOB.format(folder=folder, values=SIZES[each.size], length=LENGTH, batch=batch, microbatch=microbatch)
    path = folder / "job.yaml"
    path.write_text(job)
    return path


def measure(each: Combination, job: Path) -> int:
    """Run the job for real and return the peak of its second and third step, of the rank that holds most."""
    words = [word for setting in each.overrides for word in ("--set", setting)]
    program = ("-m", "tests.memory.live_program", str(job.parent), "--config", str(job), *words)
    command = accelerate_command(each.strategy, *program, processes=each.num_ranks)
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    if ended.returncode:
        raise SystemExit(f"{each.name}: {(ended.stdout + ended.stderr)[-3000:]}")
    peaks = [json.loads((job.parent / f"{rank}.json").read_text()) for rank in range(each.num_ranks)]
    return max(peak for of_rank in peaks for peak in of_rank[1:])


def format_table(rows: Sequence[Any], errors: Sequence[float]) -> str:
    """Return the page."""
    lines = [
        "# Predicted and measured peak memory",
        "",
        "`python benchmarks/plan_memory.py`: the peak of all tensors in a step, predicted without values by",
        "`finetune.memory.predict`, and measured by live bytes in processes on CPUs (gloo; two ranks, `single`: one).",
        f"Llama-shaped models in float32, rows of {LENGTH} tokens, microbatches of 2 rows.",
        "",
        "| model | strategy | method | recomputation | predicted, MB | measured, MB | error | seconds to predict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each, predicted, measured, seconds, error in rows:
        recomputes = "yes" if each.recomputes else "no"
        cells = (each.size, each.strategy, each.method, recomputes)
        figures = (f"{predicted / 1e6:.1f}", f"{measured / 1e6:.1f}", f"{error:+.1%}", f"{seconds:.1f}")
        lines.append(f"| {' | '.join((*cells, *figures))} |")
    lines += ["", f"Largest error {max(errors):.1%}, median {statistics.median(errors):.1%}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
