"""Random documents: as text with one word per token for ours, as tokens for the others."""

import json
import math
import random
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<unk>", "<pad>", "<end>")
PAD = SPECIAL.index("<pad>")
MEDIAN, SIGMA = 350, 0.9
"""Of lengths that vary: lognormal."""


def write_tokenizer(folder: Path, *, vocabulary: int) -> Path:
    """Write a tokenizer of this number of words, `w3` being token 3, and return its folder."""
    words = [*SPECIAL, *(f"w{number}" for number in range(len(SPECIAL), vocabulary))]
    table = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    table.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<end>"}
    PreTrainedTokenizerFast(tokenizer_object=table, **special).save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


def documents(count: int, *, length: int, varies: bool, vocabulary: int) -> list[list[int]]:
    """Return this number of documents, the same at each call; each ends with the end-of-sequence token."""
    draw = random.Random(7)
    median = min(MEDIAN, length // 2)
    rows = []
    for _ in range(count):
        size = length if not varies else min(length, max(8, round(draw.lognormvariate(math.log(median), SIGMA))))
        rows.append([*(draw.randrange(len(SPECIAL), vocabulary) for _ in range(size - 1)), SPECIAL.index("<end>")])
    return rows


def write_text(path: Path, rows: list[list[int]]) -> None:
    """Write the documents as text; the end-of-sequence token is not in it."""
    lines = (json.dumps({"text": " ".join(f"w{token}" for token in row[:-1])}) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines))


def describe(rows: list[list[int]]) -> str:
    """Return the lengths in words."""
    lengths = sorted(len(row) for row in rows)
    quartiles = [lengths[len(lengths) * part // 4] for part in (1, 2, 3)]
    return f"tokens a document: {lengths[0]} / {' / '.join(map(str, quartiles))} / {lengths[-1]} (min, quartiles, max)"


def mean_length(rows: list[list[int]]) -> float:
    """Return the mean length of the document in which a token stands: attention costs that much for each."""
    return sum(len(row) ** 2 for row in rows) / sum(map(len, rows))
