"""Texts and words with classes, and texts with numbers: rows in which a word decides."""

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from sklearn.metrics import f1_score, matthews_corrcoef
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from tests.small_job import WORDS
from tests.task_cases.case import Case

PLACES = ("oslo", "rome", "new york")

BERT = """
  from_config:
    model_type: bert
    values:
      {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
       max_position_embeddings: 64, hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0,
       initializer_range: 0.2}
  tokenizer: {train: {vocabulary_size: 320}}
"""

LLAMA = """
  from_config:
    model_type: llama
    values:
      {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
       max_position_embeddings: 64, initializer_range: 0.2}
  tokenizer: {train: {vocabulary_size: 320}}
"""


def job(name: str, model: str, task: str) -> str:
    """Return the job of a case."""
    return f"""
run: {{folder: runs/{name}, seed: 7}}
model: {model}
data: {{train: {{path: train.jsonl}}, validation: {{path: held_out.jsonl}}, max_length: 48}}
task: {task}
train: {{global_batch_size: 8, microbatch_size: 2, steps: 4, learning_rate: 1e-2}}
evaluate: {{}}
report: {{console: plain}}
"""


def write(folder: Path, *, row: Callable[[list[str], random.Random], dict[str, Any]]) -> None:
    """Write rows that are made of two to eight words."""
    chance = random.Random(3)
    for name, count in (("train.jsonl", 60), ("held_out.jsonl", 21)):
        rows = (row(chance.choices(WORDS, k=chance.randint(2, 8)), chance) for _ in range(count))
        (folder / name).write_text("".join(json.dumps(each) + "\n" for each in rows))


def one_class(words: list[str], chance: random.Random) -> dict[str, Any]:
    """Return words and which kind of color the first is of."""
    kind = "grey" if words[0] in ("white", "black", "grey") else "warm" if words[0] in ("red", "amber") else "other"
    return {"text": " ".join(words), "label": kind}


def pair(words: list[str], chance: random.Random) -> dict[str, Any]:
    """Return two texts and whether they begin alike, as a truth value."""
    second = [words[0] if chance.random() < 0.5 else chance.choice(WORDS), *chance.choices(WORDS, k=2)]
    return {"text": " ".join(words), "text_pair": " ".join(second), "label": words[0] == second[0]}


def several_classes(words: list[str], chance: random.Random) -> dict[str, Any]:
    """Return words and which of three colors are among them."""
    return {"text": " ".join(words), "label": [word for word in ("red", "blue", "pink") if word in words]}


def number(words: list[str], chance: random.Random) -> dict[str, Any]:
    """Return words and a number that grows with their count."""
    return {"text": " ".join(words), "label": len(words) / 4 + chance.random() / 10}


def tags(words: list[str], chance: random.Random) -> dict[str, Any]:
    """Return words among which stand places, and the tag of each."""
    tokens, tagged = [], []
    for word in words:
        tokens, tagged = [*tokens, word], [*tagged, "O"]
        if chance.random() < 0.3:
            first, *rest = chance.choice(PLACES).split()
            tokens, tagged = [*tokens, first, *rest], [*tagged, "B-LOC", *["I-LOC"] * len(rest)]
    return {"tokens": tokens, "tags": tagged}


def held_out(folder: Path) -> list[dict[str, Any]]:
    """Return the rows to evaluate on."""
    return [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]


def exported(final: Path, auto: Any) -> Any:
    """Return the model of the folder, or the adapter there on its base, which has the classes in its config."""
    if not (final / "adapter_config.json").exists():
        return auto.from_pretrained(final)
    return PeftModel.from_pretrained(auto.from_pretrained(final / "base"), final)


def logits(final: Path, rows: list[dict[str, Any]]) -> tuple[torch.Tensor, Any]:
    """Return the exported model's answers to all rows in one padded batch, and its config."""
    model, tokenizer = exported(final, AutoModelForSequenceClassification), AutoTokenizer.from_pretrained(final)
    pairs = [row["text_pair"] for row in rows] if "text_pair" in rows[0] else None
    inputs = tokenizer([row["text"] for row in rows], pairs, padding=True, return_tensors="pt")
    with torch.no_grad():
        return model.eval()(**inputs).logits, model.config


def macro_f1(final: Path, folder: Path) -> float:
    """Return the F1 of the class names that the exported config gives."""
    rows = held_out(folder)
    answers, config = logits(final, rows)
    assert config.problem_type == "single_label_classification"
    names = [row["label"] if isinstance(row["label"], str) else json.dumps(row["label"]) for row in rows]
    return float(f1_score(names, [config.id2label[i] for i in answers.argmax(-1).tolist()], average="macro"))


def mcc(final: Path, folder: Path) -> float:
    """Return Matthews' correlation."""
    rows = held_out(folder)
    answers, config = logits(final, rows)
    return float(matthews_corrcoef([config.label2id[row["label"]] for row in rows], answers.argmax(-1)))


def micro_f1(final: Path, folder: Path) -> float:
    """Return the F1 over all classes of all rows, as the sigmoid's half decides."""
    rows = held_out(folder)
    answers, config = logits(final, rows)
    assert config.problem_type == "multi_label_classification"
    names = [config.id2label[n] for n in range(config.num_labels)]
    wanted = [[name in row["label"] for name in names] for row in rows]
    return float(f1_score(wanted, (answers.sigmoid() > 0.5).numpy(), average="micro", zero_division=0.0))


def mse(final: Path, folder: Path) -> float:
    """Return the mean squared error."""
    rows = held_out(folder)
    answers, config = logits(final, rows)
    assert config.problem_type == "regression"
    return float((answers[:, 0].double() - torch.tensor([row["label"] for row in rows])).square().mean())


def tag_loss(final: Path, folder: Path) -> float:
    """Return the mean cross-entropy of the words' tags, read at the first token of each, sentence by sentence."""
    model, tokenizer = exported(final, AutoModelForTokenClassification), AutoTokenizer.from_pretrained(final)
    losses = [each for row in held_out(folder) for each in _tag_losses(model.eval(), tokenizer, row)]
    return sum(losses) / len(losses)


def _tag_losses(model: Any, tokenizer: Any, row: dict[str, Any]) -> Iterator[float]:
    words = [row["tokens"][0], *(f" {word}" for word in row["tokens"][1:])]  # byte-level BPE marks words by the blank
    inputs = tokenizer(words, is_split_into_words=True, return_tensors="pt")
    with torch.no_grad():
        logs = model(**inputs).logits[0].double().log_softmax(dim=-1)
    word_of = inputs.word_ids(0)
    for number, tag in enumerate(row["tags"]):
        yield -float(logs[word_of.index(number), model.config.label2id[tag]])


NAME = "text_classification"
WEIGHTED = f"{{name: {NAME}, label_smoothing: 0.1, classification: {{class_weights: balanced}}}}"
KINDS = {kind: f"{{name: {NAME}, classification: {{kind: {kind}}}}}" for kind in ("multi_label", "regression")}
PLAIN, TAGS = f"{{name: {NAME}}}", "{name: token_classification}"

CASES = (
    Case("text_classification", job("class", BERT, WEIGHTED), partial(write, row=one_class), "macro_f1", macro_f1),
    Case("text_pairs", job("pairs", BERT, PLAIN), partial(write, row=pair), "macro_f1", macro_f1),
    Case(
        "multi_label",
        job("several", BERT, KINDS["multi_label"]),
        partial(write, row=several_classes),
        "micro_f1",
        micro_f1,
    ),
    Case("regression", job("number", BERT, KINDS["regression"]), partial(write, row=number), "mse", mse),
    Case("decoder_classification", job("decoder", LLAMA, PLAIN), partial(write, row=one_class), "mcc", mcc),
    Case("token_classification", job("tags", BERT, TAGS), partial(write, row=tags), "loss", tag_loss),
)
