"""Topic 6, evaluation: the product's evaluator against Trainer's on documents of varying length.

`python -m comparison.evaluation FOLDER ROUNDS` runs both in turn, in one process, so neither runs next to the other.
The loss is computed by hand once, which ours has to equal.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.nn.functional import cross_entropy, pad
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

from comparison.competitors.peers import ALIKE
from comparison.controller import run_script
from comparison.data import IGNORED, Documents, load_model, load_workload, padded
from comparison.jobs import write_job
from comparison.product import build
from comparison.results import Log, PartResults, Result, Spread
from comparison.steps import make
from comparison.workloads import SMALL, TINY, Form, Sizes, Workload

TOLERANCE = 1e-5
"""Of the mean loss over all documents, relative."""
Evaluate = Callable[[], float]


def measure(folder: Path, *, form: Form, log: Log, data: Path) -> PartResults:
    """Return the speed of evaluation, on lognormal lengths and, in the full run, on GSM8K."""
    folder = folder.resolve()
    sizes, batches = form.choose((Sizes(), 12), (SMALL, 6), (TINY, 6))
    lognormal = Workload("lognormal", "", (), batches - 4, "lognormal", sizes)
    chosen = [lognormal, *([replace(lognormal, name="gsm8k", kind="gsm8k")] if form is Form.FULL else [])]
    make(folder, chosen, data=data)
    found = PartResults([], [], {}, [])
    for workload in chosen:
        figures = run_script("comparison.evaluation", folder / workload.name, form.choose(15, 2, 1))
        ours, bare = figures["losses"]["ours"], figures["losses"]["bare"]
        if abs(ours - bare) > TOLERANCE * bare:
            found.missing.append(f"evaluation: {workload.name}: the loss is {ours}, by hand it is {bare}")
        ratio = Spread.of_ratios(figures["seconds"]["trainer"], figures["seconds"]["ours"])
        what = f"evaluation, {workload.name}: non-pad tokens per CPU-second, ours / Trainer"
        note = f"microbatches of {workload.batch}; {(folder / workload.name / 'lengths').read_text()}"
        found.results.append(Result(6, what, ratio, 1.5, "higher", note=note))
        found.record[workload.name] = figures
        log(f"{what}: {ratio}")
    return found


def main(folder: Path, rounds: int) -> None:
    """Evaluate and leave `figures.json`."""
    documents, draw = evaluated(folder), random.Random(0)
    evaluations = {"ours": ours(folder), "trainer": trainer(folder, documents), "bare": by_hand(folder, documents)}
    losses = {name: evaluate() for name, evaluate in evaluations.items()}  # also warms up
    seconds: dict[str, list[float]] = {"ours": [], "trainer": []}
    for _ in range(rounds):
        for name in draw.sample(sorted(seconds), len(seconds)):
            started = time.process_time()
            evaluations[name]()
            seconds[name].append(time.process_time() - started)
    losses.pop("trainer")  # the mean of the means of batches
    figures = {"seconds": seconds, "losses": losses, "tokens": int(documents.lengths.sum())}
    (folder / "figures.json").write_text(json.dumps(figures))


def evaluated(folder: Path) -> Documents:
    """Return the first documents, as many as the workload's steps take."""
    workload, documents = load_workload(folder), Documents.load(folder / "tokens.npz")
    offsets = documents.offsets[: workload.steps * workload.batch + 1]
    return Documents(documents.ids[: offsets[-1]], documents.is_target[: offsets[-1]], offsets)


def ours(folder: Path) -> Evaluate:
    """Return the evaluation as a run builds it."""
    workload = load_workload(folder)
    text = write_job(folder, workload).read_text()
    source = next(line for line in text.splitlines() if line.startswith("  train: "))
    taken = source.replace("train: {", f"validation: {{take: {workload.steps * workload.batch}, ")
    (folder / "evaluation.yaml").write_text(text.replace("data:\n", f"data:\n{taken}\n", 1) + "evaluate: {}\n")
    return build(folder / "evaluation.yaml").evaluator()


def trainer(folder: Path, documents: Documents) -> Evaluate:
    """Return Trainer's, which computes the loss alone."""
    workload, tokenizer = load_workload(folder), AutoTokenizer.from_pretrained(folder / "model", local_files_only=True)
    settings = TrainingArguments(
        output_dir=str(folder / "runs" / "trainer"), per_device_eval_batch_size=workload.batch, **ALIKE
    )
    peer = Trainer(
        load_model(folder),
        settings,
        eval_dataset=Dataset.from_dict(documents.columns()),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
    )
    return lambda: float(peer.evaluate()["eval_loss"])


def by_hand(folder: Path, documents: Documents) -> Evaluate:
    """Return padded batches through the model, and nothing else."""
    workload, model = load_workload(folder), load_model(folder).eval()

    def evaluate() -> float:
        total, count = 0.0, 0
        with torch.no_grad():
            for first in range(0, len(documents), workload.batch):
                batch = padded([documents.row(i) for i in range(first, first + workload.batch)], pad_id=0)
                labels = pad(batch.pop("labels")[:, 1:], (0, 1), value=IGNORED)
                logits: Any = model(**batch, use_cache=False).logits
                total += float(cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
                count += int((labels != IGNORED).sum())
        return total / count

    return evaluate


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]))
