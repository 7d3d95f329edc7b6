"""`distillation` from a small random teacher: asked live about all tokens, and once for its likeliest ones."""

import json
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.small_models import byte_tokenizer
from tests.task_cases.case import Case
from tests.task_cases.language import REST, conversations

STUDENT = """
  from_config:
    model_type: llama
    values:
      {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
       tie_word_embeddings: true, max_position_embeddings: 256}
  tokenizer: {name: ./teacher}
"""

LIVE = f"""
run: {{folder: runs/distillation, seed: 7}}
model: {STUDENT}
data: {{train: {{path: train.jsonl}}, validation: {{path: held_out.jsonl}}, max_length: 192, chat_template: chatml}}
task:
  name: distillation
  distillation: {{teacher: ./teacher, divergence: jsd, jsd_beta: 0.3, temperature: 2.0, cross_entropy_weight: 0.25}}
{REST}
"""

CACHED = f"""
run: {{folder: runs/distillation_cached, seed: 7}}
model: {STUDENT}
data: {{train: {{path: train.jsonl}}, validation: {{path: held_out.jsonl}}, max_length: 192, chat_template: chatml}}
task: {{name: distillation, distillation: {{teacher: ./teacher, top_k: 8, cache: true}}}}
{REST}
"""


def teacher_and_rows(folder: Path) -> None:
    """Write the rows, and a teacher with a tokenizer of bytes."""
    conversations(folder)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    tokenizer = byte_tokenizer(special=special, pad_token="<|pad|>", additional_special_tokens=special[1:3])
    tokenizer.save_pretrained(folder / "teacher")
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.3, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "teacher")


def divergence(final: Path, folder: Path, *, top_k: int | None, temperature: float, beta: float | None) -> float:
    """Return the mean divergence over the answers' tokens and the one that ends each; without `beta`, forward KL."""
    student, tokenizer = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    total, count = 0.0, 0
    for row in map(json.loads, (folder / "held_out.jsonl").read_text().splitlines()):
        asked = f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n"
        start = len(tokenizer(asked)["input_ids"])
        ids = torch.tensor([[*tokenizer(asked + row["completion"])["input_ids"], end]])
        with torch.no_grad():
            logits = [model.eval()(ids).logits[0, start - 1 : -1].double() for model in (teacher, student)]
        p, q = ((each / temperature).softmax(dim=-1) for each in logits)
        if top_k is not None:
            kept = p.topk(top_k).indices
            known = [each.gather(1, kept) for each in (p, q)]
            p, q = (torch.cat([each, 1 - each.sum(1, keepdim=True)], dim=1) for each in known)
        if beta is None:
            total += (p * (p / q).log()).sum().item()
        else:
            mixed = beta * p + (1 - beta) * q
            total += (beta * p * (p / mixed).log() + (1 - beta) * q * (q / mixed).log()).sum().item()
        count += ids.shape[1] - start
    return total / count


CASES = (
    Case(
        "distillation", LIVE, teacher_and_rows, "divergence", partial(divergence, top_k=None, temperature=2.0, beta=0.3)
    ),
    Case(
        "distillation_cached",
        CACHED,
        teacher_and_rows,
        "divergence",
        partial(divergence, top_k=8, temperature=1.0, beta=None),
    ),
)
