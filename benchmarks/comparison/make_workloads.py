"""Makes the folders of the workloads: `python -m comparison.make_workloads FOLDER`, where `workloads.json` lies in it.

A workload's folder holds the rows as text for the product, and as tokens, which are the product's own, for everybody
else; the model that all start from; and the lengths in words.
"""

import json
import random
import string
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from finetune.data.token_cache.store import TokenCache
from finetune.model.processing import train_or_load_tokenizer

from comparison.data import Documents
from comparison.jobs import write_job
from comparison.product import samples_of
from comparison.workloads import Workload

SIGMA = 0.9
"""Of the logarithm of the lengths."""


def main(folder: Path) -> None:
    """Make every workload of the list."""
    spec = json.loads((folder / "workloads.json").read_text())
    for record in spec["workloads"]:
        workload = Workload.of(record)
        make(folder / workload.name, workload, data=Path(spec["data"]))


def make(folder: Path, workload: Workload, *, data: Path) -> None:
    """Make the folder of a workload."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "workload.json").write_text(json.dumps(workload.record()))
    draw = random.Random(workload.kind)
    rows = _questions(data, draw) if workload.kind == "gsm8k" else _documents(workload, draw)
    written = list(islice(rows, workload.documents))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    tokenizer = _tokenizer(folder, workload, written)
    _save_model(folder, workload, tokenizer)
    _save_tokens(folder, workload)


def _documents(workload: Workload, draw: random.Random) -> Iterator[dict[str, str]]:
    """Yield documents of words, each of which is a token; a few tokens mark turns or the end."""
    words = [f"w{number}" for number in range(workload.sizes.vocabulary - len(_SPECIAL))]

    def text(length: int) -> str:
        return " ".join(words[int(len(words) * draw.random() ** 3)] for _ in range(length))

    while True:
        length = workload.length
        if workload.kind != "fixed":
            length = min(workload.max_length, max(12, round(draw.lognormvariate(np.log(length), SIGMA))))
        if workload.is_sft:
            asked = round((length - 4) * draw.uniform(0.3, 0.7))
            yield {"prompt": text(asked), "completion": text(length - 4 - asked)}
        else:
            yield {"text": text(length - 1)}


def _questions(data: Path, draw: random.Random) -> Iterator[dict[str, str]]:
    """Yield GSM8K's rows in an order of our own, or made-up ones of about their lengths."""
    path = data / "gsm8k" / "train.jsonl"
    if not path.exists():
        yield from _invented(draw)
        return
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    draw.shuffle(rows)
    while True:
        for row in rows:
            yield {"prompt": row["question"], "completion": row["answer"]}


def _invented(draw: random.Random) -> Iterator[dict[str, str]]:
    words = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 8))) for _ in range(4000)]
    while True:
        counts = (min(200, round(draw.lognormvariate(*shape))) for shape in ((4.1, 0.35), (4.3, 0.45)))
        prompt, completion = (" ".join(words[int(4000 * draw.random() ** 3)] for _ in range(n)) for n in counts)
        yield {"prompt": prompt, "completion": completion}


_SPECIAL = ("<unk>", "<pad>", "<end>", "<turn>", "<over>")
_TURNS = """\
{%- for message in messages %}{{ '<turn> ' + message['content'] + ' <over> ' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<turn> ' }}{% endif -%}
"""


def _tokenizer(folder: Path, workload: Workload, rows: list[dict[str, str]]) -> PreTrainedTokenizerBase:
    if workload.kind == "gsm8k":
        size = workload.sizes.vocabulary
        return train_or_load_tokenizer(
            lambda: (text for row in rows for text in row.values()),
            vocabulary_size=size,
            cache_folder=folder / "cache",
            log=print,
        )
    vocabulary = [*_SPECIAL, *(f"w{number}" for number in range(workload.sizes.vocabulary - len(_SPECIAL)))]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (folder / "turns.jinja").write_text(_TURNS)
    named = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<end>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, additional_special_tokens=["<turn>", "<over>"], **named)


def _save_model(folder: Path, workload: Workload, tokenizer: PreTrainedTokenizerBase) -> None:
    torch.manual_seed(0)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**workload.sizes.values(), **ids))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def _save_tokens(folder: Path, workload: Workload) -> None:
    """Write the tokens as the product makes them of the rows, in their order."""
    samples = samples_of(write_job(folder, workload))
    assert isinstance(samples, TokenCache)
    offsets = np.concatenate(([0], np.cumsum(samples.lengths)))
    tokens, is_target = (np.concatenate(samples.stored.pieces(name)) for name in ("input_ids", "is_target"))
    documents = Documents(tokens.astype(np.int64), is_target, offsets)
    assert len(documents) == workload.documents, f"{workload.name}: {len(documents)} documents"
    documents.save(folder / "tokens.npz")
    (folder / "mean_length").write_text(str(float(documents.lengths.mean())))
    (folder / "lengths").write_text(documents.describe(workload.batch))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
