"""Anchors with passages, pairs with scores, and queries with candidates: rows in which common words decide."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cosine_similarity, cross_entropy, normalize
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from tests.small_job import WORDS
from tests.task_cases.case import Case
from tests.task_cases.classification import BERT, LLAMA, exported, held_out, job


def write(folder: Path, *, kind: str, num_rows: int = 60) -> None:
    """Write rows; some anchors and passages occur twice."""
    chance = random.Random(5)
    for name, count in (("train.jsonl", num_rows), ("held_out.jsonl", 21)):
        rows = [_row(chance, kind) for _ in range(count)]
        (folder / name).write_text("".join(json.dumps(each) + "\n" for each in rows))


def _row(chance: random.Random, kind: str) -> dict[str, Any]:
    words = chance.choices(WORDS, k=chance.randint(1, 5))
    others = [" ".join(chance.choices(WORDS, k=chance.randint(1, 6))) for _ in range(chance.randint(1, 3))]
    if kind == "scored":
        shared = len(set(words) & set(others[0].split())) / len(set(words))
        return {"sentence1": " ".join(words), "sentence2": others[0], "score": shared}
    right = " ".join(chance.sample(words, k=len(words)))
    if kind == "candidates":
        return {"query": " ".join(words), "positive": right, "negatives": others}
    return {"anchor": " ".join(words), "positive": right, "negatives": others[1:]}


def loss_of_all(final: Path, folder: Path) -> float:
    """Return the loss of one step over all rows, in both directions and at both sizes, with duplicates left out."""
    rows = held_out(folder)
    anchors, positives = [row["anchor"] for row in rows], [row["positive"] for row in rows]
    passages = [*positives, *(each for row in rows for each in row["negatives"])]
    right = {anchor: {row["positive"] for row in rows if row["anchor"] == anchor} for anchor in anchors}
    forward = [[place != i and text in right[a] for place, text in enumerate(passages)] for i, a in enumerate(anchors)]
    backward = [[place != i and p in right[a] for place, a in enumerate(anchors)] for i, p in enumerate(positives)]
    assert sum(map(sum, forward)) > 0
    queries, found = (
        vectors(final, [f"{name}: {text}" for text in texts])
        for name, texts in (("query", anchors), ("passage", passages))
    )
    own, losses = torch.arange(len(rows)), []
    for size in (32, 8):
        similar = normalize(queries[:, :size]) @ normalize(found[:, :size]).T / 0.1
        there = similar.masked_fill(torch.tensor(forward), -torch.inf)
        back = similar[:, : len(rows)].T.masked_fill(torch.tensor(backward), -torch.inf)
        losses += [cross_entropy(there, own), cross_entropy(back, own)]
    return float(torch.stack(losses).mean())


def vectors(final: Path, texts: list[str]) -> torch.Tensor:
    """Return the mean of each text's states, one text at a time, by transformers alone."""
    model, tokenizer = exported(final, AutoModel), AutoTokenizer.from_pretrained(final)
    with torch.no_grad():
        each = [model.eval()(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(dim=0) for text in texts]
    return torch.stack(each).double()


def cosent_of_all(final: Path, folder: Path) -> float:
    """Return CoSENT's loss over all pairs by its definition, from the state at the last token of a decoder."""
    rows = held_out(folder)
    model, tokenizer = exported(final, AutoModel), AutoTokenizer.from_pretrained(final)
    assert tokenizer("red")["input_ids"][-1] == tokenizer.eos_token_id
    with torch.no_grad():
        first, second = (
            torch.stack(
                [model.eval()(**tokenizer(row[name], return_tensors="pt")).last_hidden_state[0, -1] for row in rows]
            )
            for name in ("sentence1", "sentence2")
        )
    similar = cosine_similarity(first.double(), second.double())
    scores = torch.tensor([row["score"] for row in rows])
    terms = [
        (similar[j] - similar[i]) / 0.05 for i in range(len(rows)) for j in range(len(rows)) if scores[i] > scores[j]
    ]
    return float(torch.stack([torch.zeros((), dtype=torch.float64), *terms]).logsumexp(dim=0))


def reciprocal_rank(final: Path, folder: Path) -> float:
    """Return the mean reciprocal rank of the positives among the passages of their own rows."""
    model, tokenizer = exported(final, AutoModelForSequenceClassification), AutoTokenizer.from_pretrained(final)
    ranks = []
    for row in held_out(folder):
        passages = [row["positive"], *row["negatives"]]
        inputs = tokenizer([row["query"]] * len(passages), passages, padding=True, return_tensors="pt")
        with torch.no_grad():
            scores = model.eval()(**inputs).logits[:, 0]
        ranks.append(1 + int((scores[1:] >= scores[0]).sum()))
    return sum(1 / rank for rank in ranks) / len(ranks)


PAIRS = """{name: embedding, embedding: {temperature: 0.1, symmetric: true, matryoshka_dims: [8],
       prompts: {query: 'query: ', passage: 'passage: '}}}"""
SCORED = "{name: embedding, embedding: {loss: cosent, pooling: last_token}}"

CASES = (
    Case("embedding", job("pairs", BERT, PAIRS), partial(write, kind="pairs"), "loss", loss_of_all),
    Case("scored_pairs", job("scored", LLAMA, SCORED), partial(write, kind="scored"), "loss", cosent_of_all),
    Case(
        "reranking",
        job("candidates", BERT, "{name: reranking}"),
        partial(write, kind="candidates"),
        "mrr_at_10",
        reciprocal_rank,
    ),
)
