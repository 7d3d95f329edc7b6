"""Evaluates one model with the product and with Trainer in turn: `python evaluation_rounds.py FOLDER ROUNDS`.

Both live in one process, so neither runs beside the other. Once the loss is computed by hand, which ours has to be.
Leaves `figures.json`.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.nn.functional import cross_entropy, pad
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

from finetune.config.load import load_config
from finetune.report.reporter import NullReporter
from finetune.report.run_log import RunLog
from finetune.run.build.data import make_training_data
from finetune.run.build.evaluator import make_evaluator
from finetune.run.build.prepared_model import make_accelerator, prepare_model
from finetune.run.train import launched_strategy

from contest.jobs import write_job
from contest.loading import load_model, load_workload
from contest.peers import ALIKE
from contest.rows import IGNORED, Rows, padded

Evaluate = Callable[[], float]


def main(folder: Path, rounds: int) -> None:
    rows, chance = evaluated(folder), random.Random(0)
    evaluations = {"ours": ours(folder), "trainer": trainer(folder, rows), "bare": by_hand(folder, rows)}
    losses = {name: evaluate() for name, evaluate in evaluations.items()}  # also warms up
    seconds: dict[str, list[float]] = {"ours": [], "trainer": []}
    for _ in range(rounds):
        for name in chance.sample(sorted(seconds), len(seconds)):
            started = time.process_time()
            evaluations[name]()
            seconds[name].append(time.process_time() - started)
    losses.pop("trainer")  # its mean is of batches, whatever is in them
    told = {"seconds": seconds, "losses": losses, "tokens": int(rows.lengths.sum())}
    (folder / "figures.json").write_text(json.dumps(told))


def evaluated(folder: Path) -> Rows:
    """Return the first documents, as many as the workload learns from."""
    workload, rows = load_workload(folder), Rows.load(folder / "tokens.npz")
    offsets = rows.offsets[: workload.steps * workload.batch + 1]
    return Rows(rows.ids[: offsets[-1]], rows.is_target[: offsets[-1]], offsets)


def ours(folder: Path) -> Evaluate:
    """Return the evaluation as a run builds it."""
    job = write_job(folder, load_workload(folder))
    text = job.read_text().replace("data:\n", "data:\n  validation: {fraction: 0.5}\n", 1)
    source = next(line for line in text.splitlines() if line.startswith("  train: "))
    workload = load_workload(folder)
    taken = source.replace("train: {", f"validation: {{take: {workload.steps * workload.batch}, ")
    text = text.replace("  validation: {fraction: 0.5}", taken, 1)
    (folder / "evaluation.yaml").write_text(text + "evaluate: {}\n")
    loaded, say = load_config(folder / "evaluation.yaml"), RunLog(is_main=False)
    config, strategy = loaded.config, launched_strategy(loaded)
    lessons = make_training_data(config, say)
    accelerator = make_accelerator(config, strategy)
    machine = prepare_model(
        config, strategy, accelerator=accelerator, training_data=lessons, learning_rate=1e-3, log=say
    )
    evaluator = make_evaluator(
        config,
        lessons.task,
        rows=lessons.validation_set,
        model=machine.model,
        accelerator=accelerator,
        tokenizer=lessons.tokenizer,
        answer_metrics={},
        reporter=NullReporter(),
    )
    return lambda: evaluator(0)["loss"]


def trainer(folder: Path, rows: Rows) -> Evaluate:
    """Return Trainer's, which computes the loss alone."""
    workload, tokenizer = load_workload(folder), AutoTokenizer.from_pretrained(folder / "model", local_files_only=True)
    settings = TrainingArguments(
        output_dir=str(folder / "runs" / "trainer"), per_device_eval_batch_size=workload.batch, **ALIKE
    )
    peer = Trainer(
        load_model(folder, workload),
        settings,
        eval_dataset=Dataset.from_dict(rows.columns()),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
    )
    return lambda: float(peer.evaluate()["eval_loss"])


def by_hand(folder: Path, rows: Rows) -> Evaluate:
    """Return padded batches through the model, and nothing else."""
    workload = load_workload(folder)
    model = load_model(folder, workload).eval()

    def evaluate() -> float:
        total, count = 0.0, 0
        with torch.no_grad():
            for first in range(0, len(rows), workload.batch):
                batch = padded([rows.row(i) for i in range(first, first + workload.batch)], pad_id=0)
                labels = pad(batch.pop("labels")[:, 1:], (0, 1), value=IGNORED)
                logits: Any = model(**batch, use_cache=False).logits
                total += float(cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
                count += int((labels != IGNORED).sum())
        return total / count

    return evaluate


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]))
