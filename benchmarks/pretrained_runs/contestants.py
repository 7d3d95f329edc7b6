"""The two programs as processes that take steps in turns: the product on a job file, and the peer of the task."""

import importlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from comparison.competitors.peers import ALIKE, Waiting
from comparison.data import IGNORED
from comparison.product import observed, run_folder, samples_of
from comparison.product import train as train_job
from comparison.worker import Worker, memory_bytes
from pretrained_runs.cases import HEADS, MAX_LENGTH, Case, labels_of, read_rows

Rows = list[dict[str, Any]]

KILLED = "fsdp2"
"""The strategy that is killed; `pretrained resumed` goes on with its run."""

STEPS_OF_TWO = 5
SAVED_STEP = 3
OF_TWO_PROCESSES = (
    "train.microbatch_size=2",
    f"train.stop_after_steps={STEPS_OF_TWO}",
    f"checkpoint.every_steps={SAVED_STEP}",
)
"""What two processes are told: the schedule is that of one, whose first losses they must have."""

NEW_ADAPTER = "one process"
_OF_NEW_ADAPTER = ("model.adapter=null", "model.lora={rank: 8, alpha: 16.0, target_modules: all-linear}")


def train(name: str, folder: Path, worker: Worker, *, strategy: str | None) -> None:
    """Train the case of the folder; the tokens of SFT's rows are left in NAME.json, what was trained in runs/NAME."""
    case, started = Case.of(folder), {"begin": worker.wait, "end": partial(_count, worker)}
    if name.endswith("theirs"):
        _theirs(case, folder, worker)
    elif strategy is None:
        if case.task == "sft":
            _keep_rows(folder / "ours.json", [_tokens(each) for each in samples_of(folder / "job.yaml")])
        with observed(**started):
            train_job(folder / "job.yaml")
    else:
        run, resumes = (KILLED, True) if name.endswith("resumed") else (strategy, False)
        with observed(**started):
            changes = _OF_NEW_ADAPTER if run == NEW_ADAPTER or "tensor_parallel" in run else ()
            words = [run_folder(folder / "runs" / run), *OF_TWO_PROCESSES, *changes]
            train_job(folder / "job.yaml", words, resumes=resumes)


def _tokens(sample: Any) -> tuple[Any, Any]:
    return sample.arrays["input_ids"], sample.arrays["is_target"]


def _count(worker: Worker, record: Any) -> None:
    worker.count(tokens=record.num_tokens, targets=record.num_targets)
    worker.losses.append(record.losses.sum() / record.num_targets)
    worker.peak_bytes = memory_bytes("VmHWM")


def _theirs(case: Case, folder: Path, worker: Worker) -> None:
    rows = read_rows(folder / "rows.jsonl")
    trainer = _TRAINERS[case.task](case, folder, rows)
    if case.task == "sft":
        kept = trainer.train_dataset
        assert trainer.processing_class.decode(kept[0]["input_ids"][-1:]) == "\n"
        _keep_rows(
            folder / "theirs.json",
            [(row["input_ids"], [label != IGNORED for label in row["labels"]]) for row in kept],
        )
        trainer.train_dataset = kept.map(lambda row: {"labels": [*row["labels"][:-1], IGNORED]})
    elif case.task == "preference":
        trainer.train_dataset = trainer.train_dataset.map(
            lambda row: {name: row[name][:-1] for name in ("chosen_ids", "rejected_ids")}
        )
    trainer.add_callback(Waiting(worker))
    take = trainer.training_step

    def training_step(model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
        masks = [value for name, value in inputs.items() if name.endswith("attention_mask")]
        worker.count(tokens=sum(int(mask.sum()) for mask in masks), targets=0)
        loss = take(model, inputs, *rest, **named)
        worker.losses.append(loss)
        worker.peak_bytes = memory_bytes("VmHWM")
        return loss

    trainer.training_step = training_step
    trainer.train()
    if held_out := read_rows(folder / "held_out.jsonl") if case.task in _FIGURES else []:
        (folder / "figures.json").write_text(json.dumps(_FIGURES[case.task](trainer, held_out)))
    trainer.model.save_pretrained(str(folder / "runs" / "theirs"))


def _keep_rows(path: Path, rows: list[tuple[Any, Any]]) -> None:
    """Write the ids of rows and which of them are targets."""
    kept = [([int(each) for each in ids], [int(each) for each in is_target]) for ids, is_target in rows]
    path.write_text(json.dumps(kept))


def _settings(case: Case, folder: Path) -> dict[str, Any]:
    return {
        **ALIKE,
        "output_dir": str(folder / "runs" / "theirs-state"),
        "max_steps": case.steps,
        "per_device_train_batch_size": case.batch,
        "learning_rate": case.learning_rate,
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "bf16": False,
        "gradient_checkpointing": False,
    }


def _causal(case: Case, folder: Path) -> dict[str, Any]:
    """Return the model, with the adapter that ours starts from, and its tokenizer."""
    place = (folder / "model.path").read_text()
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    if case.has_lora:
        model = PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)
    return {"model": model, "processing_class": AutoTokenizer.from_pretrained(place)}


def _sft(case: Case, folder: Path, rows: Rows) -> Any:
    trl = importlib.import_module("trl")
    turns = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in rows]
    settings = trl.SFTConfig(**_settings(case, folder), max_length=MAX_LENGTH)
    return trl.SFTTrainer(args=settings, train_dataset=Dataset.from_list(turns), **_causal(case, folder))


def _dpo(case: Case, folder: Path, rows: Rows) -> Any:
    trl = importlib.import_module("trl")
    settings = trl.DPOConfig(**_settings(case, folder), max_length=MAX_LENGTH)
    return trl.DPOTrainer(args=settings, train_dataset=Dataset.from_list(rows), **_causal(case, folder))


def _classifier(case: Case, folder: Path, rows: Rows) -> Any:
    place, labels = (folder / "model.path").read_text(), labels_of(rows)
    tokenizer = AutoTokenizer.from_pretrained(place)
    is_tagging = case.task == "token_classification"
    collator = (DataCollatorForTokenClassification if is_tagging else DataCollatorWithPadding)(tokenizer)
    encode = partial(_tagged if is_tagging else _classified, tokenizer, labels)
    return Trainer(
        HEADS[case.task].from_pretrained(place, dtype=torch.float32),
        TrainingArguments(**_settings(case, folder)),
        train_dataset=Dataset.from_list([encode(row) for row in rows]),
        eval_dataset=Dataset.from_list([encode(row) for row in read_rows(folder / "held_out.jsonl")]),
        data_collator=collator,
        compute_metrics=_class_figures,
    )


def _classified(tokenizer: Any, labels: list[str], row: Mapping[str, Any]) -> dict[str, Any]:
    return {**tokenizer(row["text"]), "labels": labels.index(row["label"])}


def _tagged(tokenizer: Any, labels: list[str], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with a label at the first token of each word, as transformers' guide does it."""
    encoded = tokenizer(row["tokens"], is_split_into_words=True)
    words = encoded.word_ids()
    tags = [
        IGNORED if word is None or word == before else labels.index(row["tags"][word])
        for before, word in pairwise([None, *words])
    ]
    return {**encoded, "labels": tags}


def _class_figures(outcome: Any) -> dict[str, float]:
    metrics, is_target = importlib.import_module("sklearn.metrics"), outcome.label_ids != IGNORED
    labels, predicted = outcome.label_ids[is_target], outcome.predictions.argmax(-1)[is_target]
    return {
        "accuracy": metrics.accuracy_score(labels, predicted),
        "macro_f1": metrics.f1_score(labels, predicted, average="macro"),
    }


def _embedder(case: Case, folder: Path, rows: Rows) -> Any:
    sentences = importlib.import_module("sentence_transformers")
    model = sentences.SentenceTransformer((folder / "model.path").read_text(), device="cpu")
    loss = importlib.import_module("sentence_transformers.losses").MultipleNegativesRankingLoss(model, scale=20.0)
    settings = sentences.SentenceTransformerTrainingArguments(**_settings(case, folder))
    return _in_order(case, sentences.SentenceTransformerTrainer(model, settings, Dataset.from_list(rows), loss=loss))


def _reranker(case: Case, folder: Path, rows: Rows) -> Any:
    encoders = importlib.import_module("sentence_transformers.cross_encoder")
    model = encoders.CrossEncoder((folder / "model.path").read_text(), device="cpu")
    loss = importlib.import_module("sentence_transformers.cross_encoder.losses").BinaryCrossEntropyLoss(model)
    settings = encoders.CrossEncoderTrainingArguments(**_settings(case, folder))
    return _in_order(case, encoders.CrossEncoderTrainer(model, settings, Dataset.from_list(rows), loss=loss))


def _in_order(case: Case, trainer: Any) -> Any:
    """Return a trainer of sentence-transformers with batches in the file's order: its own samplers shuffle."""
    trainer.get_train_dataloader = lambda: torch.utils.data.DataLoader(
        trainer.train_dataset, batch_size=case.batch, collate_fn=trainer.data_collator
    )
    return trainer


def _of_trainer(trainer: Any, _: Rows) -> dict[str, float]:
    measured = trainer.evaluate()
    return {name: measured[f"eval_{name}"] for name in ("accuracy", "macro_f1")}


def _of_ranks(trainer: Any, rows: Rows) -> dict[str, float]:
    evaluation = importlib.import_module("sentence_transformers.evaluation")
    relevant: dict[str, set[str]] = {}
    for row in rows:
        relevant.setdefault(row["anchor"], set()).add(row["positive"])
    queries, corpus = ({text: text for text in dict.fromkeys(row[name] for row in rows)} for name in rows[0])
    evaluator = evaluation.InformationRetrievalEvaluator(queries, corpus, relevant)
    measured = evaluator(trainer.model)
    return {f"{name}_at_10": measured[f"cosine_{name}@10"] for name in ("mrr", "ndcg")}


def _of_scores(trainer: Any, rows: Rows) -> dict[str, float]:
    evaluation = importlib.import_module("sentence_transformers.cross_encoder.evaluation")
    pairs, scores = [(row["sentence1"], row["sentence2"]) for row in rows], [row["score"] for row in rows]
    measured = evaluation.CrossEncoderCorrelationEvaluator(pairs, scores)(trainer.model)
    return {name: measured[name] for name in ("pearson", "spearman")}


_FIGURES: Mapping[str, Callable[[Any, Rows], dict[str, float]]] = {
    "text_classification": _of_trainer,
    "token_classification": _of_trainer,
    "embedding": _of_ranks,
    "reranking": _of_scores,
}
"""The other program's own evaluation of held-out rows, named as in events.jsonl."""

_TRAINERS: Mapping[str, Any] = {
    "sft": _sft,
    "preference": _dpo,
    "text_classification": _classifier,
    "token_classification": _classifier,
    "embedding": _embedder,
    "reranking": _reranker,
}
