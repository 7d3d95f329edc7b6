"""What both programs train: the model, the rows and the settings; and the folder that both read them from."""

import gzip
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from finetune.recipes.quickstart import quickstart_files

from pretrained_runs.smollm2 import MINILM, SMOLLM2

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A training that both programs do."""

    name: str
    title: str
    task: str  # of the job
    source: str  # of the rows: quickstart, gsm8k or hh-rlhf
    theirs: str  # the other program
    model: str = SMOLLM2
    has_lora: bool = True
    batch: int = 4
    steps: int = 31  # the last step's cost is not known
    learning_rate: float = 1e-3

    @property
    def num_rows(self) -> int:
        """Return how many rows there are: those of the steps, and for SFT enough to compare tokens."""
        return max(300 if self.task == "sft" else 1, self.batch * self.steps)

    @classmethod
    def of(cls, folder: Path) -> "Case":
        """Return the case of a folder."""
        return cls(**json.loads((folder / "case.json").read_text()))


CASES = (
    Case("quickstart", "SFT with LoRA, the quickstart's instructions", "sft", "quickstart", "TRL"),
    Case("gsm8k", "SFT with LoRA, gsm8k", "sft", "gsm8k", "TRL", batch=2, steps=12, learning_rate=2e-4),
    Case("dpo", "DPO with LoRA, hh-rlhf", "preference", "hh-rlhf", "TRL", batch=2, steps=7, learning_rate=2e-5),
    Case("full", "all weights, quickstart", "sft", "quickstart", "TRL", has_lora=False, steps=7, learning_rate=2e-5),
    *(
        Case(task, title, task, source, theirs, MINILM, has_lora=False, batch=4, steps=12, learning_rate=rate)
        for task, title, source, theirs, rate in (
            ("text_classification", "classes of answers, hh-rlhf", "hh-rlhf", "Trainer", 5e-5),
            ("token_classification", "tags of words, gsm8k", "gsm8k", "Trainer", 1e-3),
            ("embedding", "in-batch negatives, hh-rlhf", "hh-rlhf", "sentence-transformers", 5e-5),
            ("reranking", "scored answers, hh-rlhf", "hh-rlhf", "sentence-transformers", 5e-5),
        )
    ),
)

MAX_LENGTH = 512  # tokens; no row is cut
MAX_CHARACTERS = 700
"""Of a row; longer ones are left out, since a step of 3,000 tokens takes a minute."""

NUM_HELD_OUT = {SMOLLM2: 8, MINILM: 64}
HEADS: Mapping[str, Any] = {
    "text_classification": AutoModelForSequenceClassification,
    "token_classification": AutoModelForTokenClassification,
    "reranking": AutoModelForSequenceClassification,
}


def tiny(case: Case) -> Case:
    """Return the case in its shortest form."""
    return replace(case, steps=6 if case.name == "quickstart" else 3)


def make(case: Case, folder: Path, *, models: Path, data: Path) -> None:
    """Write the folder of a case: its rows, the model and the adapter that both start from, and the job."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "case.json").write_text(json.dumps(asdict(case)))
    rows, held_out = make_rows(case, data)
    write_rows(folder / "rows.jsonl", rows[: case.num_rows])
    write_rows(folder / "held_out.jsonl", held_out)
    model = (models / case.model).resolve()
    torch.manual_seed(0)
    if case.has_lora:
        lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        get_peft_model(whole, lora).save_pretrained(folder / "adapter")
    elif case.model == MINILM:
        model = _without_dropout(case, model, folder / "model", labels=labels_of(rows))
    (folder / "model.path").write_text(str(model))
    (folder / "job.yaml").write_text(json.dumps(_job(case, model, labels_of(rows)), indent=1))


def labels_of(rows: list[Row]) -> list[str]:
    """Return the classes or tags of the rows, sorted; none where they have none."""
    return sorted({label for row in rows for label in row.get("tags", [row["label"]] if "label" in row else [])})


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write rows to a file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _job(case: Case, model: Path, labels: list[str]) -> dict[str, Any]:
    """Return the job (JSON is YAML, too): what the other program is told as well."""
    section = {"classification": {"labels": labels}} if labels else {}
    section = {"reranking": {"loss": "bce"}} if case.task == "reranking" else section
    is_evaluated = case.model == MINILM
    return {
        "run": {"folder": "runs/ours", "seed": 1},
        "model": {"name": str(model), **({"adapter": "./adapter"} if case.has_lora else {})},
        "data": {
            "train": {"path": "rows.jsonl"},
            **({"validation": {"path": "held_out.jsonl"}} if is_evaluated else {}),
            **{"max_length": MAX_LENGTH, "shuffle": False, "cache_folder": "cache"},
        },
        "task": {"name": case.task, **section},
        "train": {
            "global_batch_size": case.batch,
            "microbatch_size": case.batch,
            "steps": case.steps,
            "learning_rate": case.learning_rate,
            "schedule": {"name": "linear"},
        },
        **({"evaluate": {}} if is_evaluated else {}),
        "export": {"verify": False},
        "report": {"console": "plain", "log_every_steps": 1},
    }


def _without_dropout(case: Case, model: Path, folder: Path, *, labels: list[str]) -> Path:
    """Return a copy of an encoder that draws no random numbers, with a new head where the task has one."""
    if not folder.exists():
        shutil.copytree(model, folder)
        config = json.loads((folder / "config.json").read_text())
        config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        if case.task in HEADS:
            names = dict(enumerate(labels or ["LABEL_0"]))
            config |= {"id2label": names, "label2id": {name: number for number, name in names.items()}}
        (folder / "config.json").write_text(json.dumps(config))
        if case.task in HEADS:
            HEADS[case.task].from_pretrained(folder, dtype=torch.float32).save_pretrained(folder)
            for name in ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"):
                (folder / name).unlink(missing_ok=True)  # of the model of sentences
    return folder.resolve()


def make_rows(case: Case, data: Path) -> tuple[list[Row], list[Row]]:
    """Return rows to train on and rows that nobody trains on; the quickstart's where the real ones are not here."""
    files = {name: [json.loads(line) for line in text.splitlines()] for name, text in quickstart_files().items()}
    gsm8k, pairs = data / "gsm8k" / "train.jsonl", data / "hh-rlhf" / "harmless-base-test.jsonl.gz"
    if case.source == "gsm8k" and gsm8k.exists():
        rows = [_chat(row["question"], row["answer"]) for row in read_rows(gsm8k)]
    elif case.source == "hh-rlhf" and pairs.exists():
        with gzip.open(pairs, "rt", encoding="utf-8") as lines:
            rows = [pair for pair in map(_pair, map(json.loads, lines)) if pair]
    else:
        rows = files["train.jsonl"]
    short = [row for row in rows if len(json.dumps(row)) <= MAX_CHARACTERS]
    number = NUM_HELD_OUT[case.model]
    held_out = files["held_out.jsonl"][:50] if case.source == "quickstart" else short[-number:]
    held_out = [] if case.task == "preference" else held_out
    return [_FOR_TASK[case.task](row) for row in short[:-number]], [_FOR_TASK[case.task](row) for row in held_out]


def _chat(asked: str, answer: str) -> Row:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


def _pair(row: Mapping[str, str]) -> Row | None:
    """Return a pair of hh-rlhf of one question and two answers; None of one with more turns."""
    asked = row["chosen"].removeprefix("\n\nHuman: ").partition("\n\nAssistant: ")[0]
    answers = [row[name].removeprefix(f"\n\nHuman: {asked}\n\nAssistant: ") for name in ("chosen", "rejected")]
    if any("\n\nHuman: " in answer or not answer.strip() for answer in answers):
        return None
    return {**_chat(asked, answers[0].strip()), "other": answers[1].strip()}


def _preference(row: Row) -> Row:
    asked, chosen = row["messages"]
    rejected = {"role": "assistant", "content": row.get("other", asked["content"])}
    return {"prompt": [asked], "chosen": [chosen], "rejected": [rejected]}


def _classified(row: Row) -> Row:
    """Return a text and its class: the one of two answers that people chose, or the quickstart's instruction."""
    if "other" not in row:
        asked = row["messages"][0]["content"]
        return {"text": asked, "label": asked.partition(":")[0]}
    scored = _scored(row)
    return {"text": scored["sentence2"], "label": "chosen" if scored["score"] else "rejected"}


def _scored(row: Row) -> Row:
    """Return a question, the answer that people chose or the other one, and 1 or 0; the question itself for none."""
    asked, answer = (turn["content"] for turn in row["messages"])
    is_chosen = len(asked) % 2 == 0
    return {
        "sentence1": asked,
        "sentence2": answer if is_chosen else row.get("other", asked),
        "score": float(is_chosen),
    }


def _tagged(row: Row) -> Row:
    """Return the words of a question, tagged as numbers, names (or other words with a capital) and the rest."""
    words = row["messages"][0]["content"].split()
    tags = ["NUMBER" if any(map(str.isdigit, word)) else "NAME" if word[0].isupper() else "WORD" for word in words]
    return {"tokens": words, "tags": tags}


def _searched(row: Row) -> Row:
    asked, answer = (turn["content"] for turn in row["messages"])
    return {"anchor": asked, "positive": answer}


_FOR_TASK: Mapping[str, Callable[[Row], Row]] = {
    "sft": lambda row: row,
    "preference": _preference,
    "text_classification": _classified,
    "token_classification": _tagged,
    "embedding": _searched,
    "reranking": _scored,
}
