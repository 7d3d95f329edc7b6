"""`seq2seq` on words: a small T5 whose loss is measured, a small BART whose answers are."""

import json
import random
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from tests.small_job import WORDS
from tests.task_cases.case import Case
from tests.task_cases.language import REST

LORA_THAT_LEARNS = ("model.lora={rank: 8, alpha: 32.0}",)

T5 = f"""
run: {{folder: runs/seq2seq, seed: 7}}
model:
  from_config:
    model_type: t5
    values:
      {{d_model: 32, d_kv: 8, d_ff: 64, num_layers: 2, num_decoder_layers: 2, num_heads: 4, dropout_rate: 0.0,
       relative_attention_num_buckets: 8, relative_attention_max_distance: 32}}
  tokenizer: {{train: {{vocabulary_size: 320}}}}
data: {{train: {{path: train.jsonl}}, validation: {{path: held_out.jsonl}}, max_length: 64}}
task: {{name: seq2seq, seq2seq: {{source_prefix: "reverse: ", max_target_length: 48}}}}
{REST}
"""

BART = """
run: {folder: runs/seq2seq_answers, seed: 7}
model:
  from_config:
    model_type: bart
    values:
      {d_model: 32, encoder_layers: 1, decoder_layers: 1, encoder_attention_heads: 4, decoder_attention_heads: 4,
       encoder_ffn_dim: 64, decoder_ffn_dim: 64, dropout: 0.0, init_std: 0.2, max_position_embeddings: 128}
  tokenizer: {train: {vocabulary_size: 320}}
data: {train: {path: train.jsonl}, validation: {path: held_out.jsonl}, max_length: 64}
task: {name: seq2seq}
train: {global_batch_size: 8, microbatch_size: 2, steps: 20, learning_rate: 2e-2, schedule: {name: constant}}
evaluate: {generate: {num_samples: 7, max_new_tokens: 6, batch_size: 2, metrics: [exact_match]}}
report: {console: plain}
"""


def reversals(folder: Path) -> None:
    """Write one to eight words and the same in reverse."""
    chance = random.Random(3)
    for name, count in (("train.jsonl", 50), ("held_out.jsonl", 7)):
        rows = (chance.choices(WORDS, k=chance.randint(1, 8)) for _ in range(count))
        pairs = ({"prompt": " ".join(words), "completion": " ".join(reversed(words))} for words in rows)
        (folder / name).write_text("\n".join(map(json.dumps, pairs)))


def majorities(folder: Path) -> None:
    """Write words and, mostly, `red`: what a model learns within a few steps to answer, and is not always right."""
    chance = random.Random(4)
    for name, count in (("train.jsonl", 100), ("held_out.jsonl", 7)):
        rows = (
            {"prompt": " ".join(chance.choices(WORDS, k=3)), "completion": "blue" if number % 4 == 0 else "red"}
            for number in range(count)
        )
        (folder / name).write_text("\n".join(map(json.dumps, rows)))


def loss_of_targets(final: Path, folder: Path) -> float:
    """Return the mean loss over the targets' tokens, end-of-sequence included."""
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    total, count = 0.0, 0
    for row in map(json.loads, (folder / "held_out.jsonl").read_text().splitlines()):
        source = tokenizer(f"reverse: {row['prompt']}", return_tensors="pt")["input_ids"]
        target = torch.tensor([[*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            logits = model.eval()(input_ids=source, labels=target).logits[0]
        total += cross_entropy(logits.double(), target[0], reduction="sum").item()
        count += target.shape[1]
    return total / count


def right_answers(final: Path, folder: Path) -> float:
    """Return the share of rows that `generate` of transformers answers rightly."""
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    rows = [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]
    num_right = 0
    for row in rows:
        source = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        (answer,) = model.eval().generate(input_ids=source, max_new_tokens=6, do_sample=False, num_beams=1)
        num_right += tokenizer.decode(answer, skip_special_tokens=True).strip() == row["completion"]
    assert 0 < num_right < len(rows)
    return num_right / len(rows)


CASES = (
    Case("seq2seq", T5, reversals, "loss", loss_of_targets),
    Case("seq2seq_answers", BART, majorities, "exact_match", right_answers, {"full": (), "lora": LORA_THAT_LEARNS}),
)
