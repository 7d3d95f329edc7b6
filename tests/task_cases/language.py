"""`sft` and `pretrain` on words."""

import json
import math
import random
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from tests.small_job import WORDS
from tests.task_cases.case import Case

LLAMA = """
  from_config:
    model_type: llama
    values:
      {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
       tie_word_embeddings: true, max_position_embeddings: 256}
  tokenizer: {train: {vocabulary_size: 320}}
"""

REST = """
train: {global_batch_size: 8, microbatch_size: 2, steps: 4, learning_rate: 1e-2}
evaluate: {}
report: {console: plain}
"""

AT_TARGETS = REST.replace("learning_rate: 1e-2", "learning_rate: 1e-2, loss_kernel: chunked")
"""What `auto` chooses where there are more logits than in these small jobs."""

SFT = f"""
run: {{folder: runs/sft, seed: 7}}
model: {LLAMA}
data: {{train: {{path: train.jsonl}}, validation: {{path: held_out.jsonl}}, max_length: 128, chat_template: chatml}}
task: {{name: sft}}
{AT_TARGETS}
"""

PRETRAIN = f"""
run: {{folder: runs/pretrain, seed: 7}}
model: {LLAMA}
data: {{train: {{path: train.txt}}, validation: {{path: held_out.txt}}, max_length: 128}}
task: {{name: pretrain}}
{REST}
"""


def conversations(folder: Path) -> None:
    """Write questions and answers of one to eight words, so that every batch has another number of targets."""
    chance = random.Random(1)
    for name, count in (("train.jsonl", 50), ("held_out.jsonl", 7)):
        with (folder / name).open("w") as file:
            for _ in range(count):
                words = chance.choices(WORDS, k=chance.randint(1, 8))
                row = {"prompt": f"reverse: {' '.join(words)}", "completion": " ".join(reversed(words))}
                file.write(json.dumps(row) + "\n")


def lines(folder: Path) -> None:
    """Write lines of two to ten words."""
    chance = random.Random(2)
    for name, count in (("train.txt", 50), ("held_out.txt", 7)):
        (folder / name).write_text(
            "\n".join(" ".join(chance.choices(WORDS, k=chance.randint(2, 10))) for _ in range(count))
        )


def loss_of_text(final: Path, folder: Path) -> float:
    """Return the mean loss over all tokens but the first of each line, end-of-sequence included."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    total, count = 0.0, 0
    for line in (folder / "held_out.txt").read_text().splitlines():
        ids = torch.tensor([[*tokenizer(line)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            logits = model.eval()(ids).logits[0, :-1]
        total += cross_entropy(logits.double(), ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    return total / count


def loss_of_answers(final: Path, folder: Path) -> float:
    """Return the mean loss over the answers' tokens and the one that ends each."""
    return mean_loss(AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final), folder)


def mean_loss(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path) -> float:
    """Return the same of a model, which may read something before the tokens."""
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    total, count = 0.0, 0
    for line in (folder / "held_out.jsonl").read_text().splitlines():
        row = json.loads(line)
        asked = f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n"
        start = len(tokenizer(asked)["input_ids"])
        ids = torch.tensor([[*tokenizer(asked + row["completion"])["input_ids"], end]])
        with torch.no_grad():
            logits = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -ids.shape[1] :]
        total += cross_entropy(logits[start - 1 : -1].double(), ids[0, start:], reduction="sum").item()
        count += ids.shape[1] - start
    assert math.isfinite(total)
    return total / count


CASES = (
    Case("sft", SFT, conversations, "loss", loss_of_answers),
    Case("pretrain", PRETRAIN, lines, "loss", loss_of_text),
)
