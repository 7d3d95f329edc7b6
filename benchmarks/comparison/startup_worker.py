"""What starts beside ours: a bare script and `transformers.Trainer`; and the documents and tokenizer for all of them.

    startup_worker.py make FOLDER FEW MANY VOCABULARY
    startup_worker.py bare|trainer FOLDER DOCUMENTS LENGTH MODEL

Each imports what its user would, and ends its process right after the first step. Imports stand in
functions here: what a start costs is what is measured.
"""

import json
import os
import random
import string
import sys
import time
from pathlib import Path
from typing import Any


def make(folder: Path, few: int, many: int, vocabulary: int) -> None:
    """Write documents longer than any cut, and a tokenizer trained on some of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    draw = random.Random(1)
    words = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 9))) for _ in range(8000)]
    texts = [" ".join(draw.choices(words, k=80)) for _ in range(many)]
    for number in (few, many):
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts[:number])
        (folder / f"documents{number}.jsonl").write_text(rows)
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=["<|end|>"], initial_alphabet=letters)
    made.train_from_iterator(texts[:2000], trainer)
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", pad_token="<|end|>").save_pretrained(
        folder / "tokenizer"
    )


def bare(folder: Path, number: int, length: int, values: dict[str, Any]) -> None:
    """Take one step by hand."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    rows = _tokenized(folder, number, length, tokenizer)
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **values)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    chosen = torch.randperm(len(rows))[:8].tolist()
    ids = torch.tensor([rows[each] for each in chosen])
    logits = model(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    _end()


def trainer(folder: Path, number: int, length: int, values: dict[str, Any]) -> None:
    """Take one step with Trainer."""
    import torch
    from transformers import (
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            _end()

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    rows = [{"input_ids": row} for row in _tokenized(folder, number, length, tokenizer)]
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **values))
    settings = TrainingArguments(
        str(folder / "trainer"),
        per_device_train_batch_size=8,
        max_steps=2,
        learning_rate=1e-3,
        optim="adamw_torch_fused",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    Trainer(model, settings, data_collator=collate, train_dataset=rows, callbacks=[Stop()]).train()


def _tokenized(folder: Path, number: int, length: int, tokenizer: Any) -> list[list[int]]:
    lines = (folder / f"documents{number}.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    return [ids[:length] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def _end() -> None:
    """Print what it took from the start of the process until now, and end it."""
    import psutil

    cpu, process = time.process_time(), psutil.Process()
    print(json.dumps({"cpu": cpu, "seconds": time.time() - process.create_time()}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    what, folder, *others = sys.argv[1:]
    if what == "make":
        make(Path(folder), *map(int, others))
    else:
        {"bare": bare, "trainer": trainer}[what](Path(folder), int(others[0]), int(others[1]), json.loads(others[2]))
