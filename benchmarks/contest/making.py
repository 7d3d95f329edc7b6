"""Makes the workloads' folders, in a process of its own (make_workloads.py), so that nobody inherits it.

A folder holds the rows as text for the product, and as tokens, which are the product's own, for everybody else; the
model and the adapter that all start from; and the lengths in words.
"""

import json
import random
import string
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from finetune.config.load import load_config
from finetune.data.token_cache.store import PreparedSet
from finetune.model.tokenizer import train_or_load_tokenizer
from finetune.report.run_log import RunLog
from finetune.run.build.data import make_training_data
from finetune.runtime.optional import require

from contest.jobs import write_job
from contest.rows import Rows
from contest.workloads import Workload

SIGMA = 0.9
"""Of the logarithm of the lengths."""


def main(spec: Path) -> None:
    """Make every workload of the spec."""
    told = json.loads(spec.read_text())
    for record in told["workloads"]:
        workload = Workload.of(record)
        make(spec.parent / workload.name, workload, data=Path(told["data"]), seed=told["seed"])


def make(folder: Path, workload: Workload, *, data: Path, seed: int) -> None:
    """Make the folder of a workload."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "workload.json").write_text(json.dumps(workload.record()))
    chance = random.Random(f"{seed} {workload.kind}")
    rows = _questions(data, chance) if workload.kind == "gsm8k" else _documents(workload, chance)
    written = list(islice(rows, workload.documents))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    tokenizer = _tokenizer(folder, workload, written)
    _save_model(folder, workload, tokenizer, seed=seed)
    _save_tokens(folder, workload)


def _documents(workload: Workload, chance: random.Random) -> Iterator[dict[str, str]]:
    """Yield documents of words, each of which is a token; a few tokens are of the turns, or end the text."""
    words = [f"w{number}" for number in range(workload.sizes.vocabulary - len(_SPECIAL))]

    def text(length: int) -> str:
        return " ".join(words[int(len(words) * chance.random() ** 3)] for _ in range(length))

    while True:
        length = workload.length
        if workload.kind != "fixed":
            length = min(workload.max_length, max(12, round(chance.lognormvariate(np.log(length), SIGMA))))
        if workload.is_sft:
            asked = round((length - 4) * chance.uniform(0.3, 0.7))
            yield {"prompt": text(asked), "completion": text(length - 4 - asked)}
        else:
            yield {"text": text(length - 1)}


def _questions(data: Path, chance: random.Random) -> Iterator[dict[str, str]]:
    """Yield GSM8K's rows in an order of our own, or made-up ones of about their lengths."""
    path = data / "gsm8k" / "train.jsonl"
    if not path.exists():
        yield from _invented(chance)
        return
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    chance.shuffle(rows)
    while True:
        for row in rows:
            yield {"prompt": row["question"], "completion": row["answer"]}


def _invented(chance: random.Random) -> Iterator[dict[str, str]]:
    words = ["".join(chance.choices(string.ascii_lowercase, k=chance.randint(2, 8))) for _ in range(4000)]
    while True:
        counts = (min(200, round(chance.lognormvariate(*shape))) for shape in ((4.1, 0.35), (4.3, 0.45)))
        prompt, completion = (" ".join(words[int(4000 * chance.random() ** 3)] for _ in range(n)) for n in counts)
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


def _save_model(folder: Path, workload: Workload, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> None:
    torch.manual_seed(seed)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**workload.sizes.values(), **ids))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    if workload.lora:
        peft = require("peft", extra="benchmark", purpose="the workload with LoRA")
        adapters = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        peft.get_peft_model(model, adapters).save_pretrained(folder / "adapter")


def _save_tokens(folder: Path, workload: Workload) -> None:
    """Write the tokens as the product makes them of the rows, in its order."""
    lessons = make_training_data(load_config(write_job(folder, workload)).config, RunLog(is_main=True))
    samples = lessons.training.samples
    assert isinstance(samples, PreparedSet)
    offsets = np.concatenate(([0], np.cumsum(samples.lengths)))
    rows = Rows(samples.values("input_ids").astype(np.int64), np.array(samples.values("is_target")), offsets)
    assert len(rows) == workload.documents, f"{workload.name}: {len(rows)} rows"
    rows.save(folder / "tokens.npz")
    (folder / "mean_length").write_text(str(float(rows.lengths.mean())))
    (folder / "note").write_text(rows.note(workload.batch))
