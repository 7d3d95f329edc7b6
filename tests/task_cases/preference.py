"""`preference` and `reward`: the better of two answers, over a base that was saved before."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import torch
from peft import PeftModel
from torch.nn.functional import logsigmoid, sigmoid
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from tests.small_job import WORDS
from tests.small_models import SMALL, byte_tokenizer
from tests.task_cases.case import LORA, Case

CHATML = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' "
    "-}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)

BETA = 0.5


def job(name: str, task: str, *, form: str = "preference", rows: str = "pairs") -> str:
    return f"""
run: {{folder: runs/{name}, seed: 7}}
model: {{name: ./base}}
data:
  train: {{path: {rows}.jsonl, format: {form}}}
  validation: {{path: held_out_{rows}.jsonl, format: {form}}}
  max_length: 128
task: {task}
train: {{global_batch_size: 8, microbatch_size: 2, steps: 4, learning_rate: 1e-2}}
evaluate: {{}}
report: {{console: plain}}
"""


def prepare(folder: Path) -> None:
    """Write pairs, judged answers and a base model with its tokenizer."""
    chance = random.Random(3)
    texts = []
    for name, count in (("", 40), ("held_out_", 7)):
        with (folder / f"{name}pairs.jsonl").open("w") as pairs, (folder / f"{name}judged.jsonl").open("w") as judged:
            for number in range(count):
                words = chance.choices(WORDS, k=chance.randint(2, 8))
                prompt, right = f"reverse: {' '.join(words)}", " ".join(reversed(words))
                wrong = " ".join(chance.choices(WORDS, k=chance.randint(1, 8)))
                margin = round(chance.random(), 2)
                row = {"prompt": prompt, "chosen": right, "rejected": wrong, "margin": margin}
                pairs.write(json.dumps(row) + "\n")
                is_good = number % 3 != 0
                row = {"prompt": prompt, "completion": right if is_good else wrong, "label": is_good}
                judged.write(json.dumps(row) + "\n")
                texts += [prompt, right, wrong]
    _save_base(folder / "base", texts)


def _save_base(folder: Path, texts: list[str]) -> None:
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    fast = byte_tokenizer(texts, special=special, size=320, pad_token="<|pad|>", eos_token="<|im_end|>")
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        **SMALL,
        vocab_size=len(fast),
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        pad_token_id=fast.pad_token_id,
        eos_token_id=fast.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def tokens_of(tokenizer: PreTrainedTokenizerFast, prompt: str, answer: str) -> tuple[torch.Tensor, int]:
    """Return the tokens of the conversation and where the answer begins."""
    asked = [{"role": "user", "content": prompt}]
    start = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
    whole = tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": answer}], return_dict=True)
    return torch.tensor([whole["input_ids"]]), len(start)


class Scorer:
    """Log-probabilities of answers and their tokens under a folder's model; the end of the turn is the last token."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def __call__(self, prompt: str, answer: str) -> tuple[torch.Tensor, int]:
        ids, start = tokens_of(self.tokenizer, prompt, answer)
        end = int((ids[0] == self.tokenizer.convert_tokens_to_ids("<|im_end|>")).nonzero()[-1]) + 1
        with torch.no_grad():
            each = self.model(ids).logits[0].double().log_softmax(-1)[start - 1 : end - 1]
        return each.gather(1, ids[0, start:end, None]).sum(), end - start


def dpo_loss(final: Path, folder: Path) -> float:
    """Return the mean of `-log s(beta m)` over the held-out pairs, the reference being the base."""
    policy, reference = Scorer(final), Scorer(folder / "base")
    losses = []
    for row in rows_of(folder / "held_out_pairs.jsonl"):
        ratios = [policy(row["prompt"], row[side])[0] - reference(row["prompt"], row[side])[0] for side in SIDES]
        losses.append(-logsigmoid(BETA * (ratios[0] - ratios[1])))
    return float(torch.stack(losses).mean())


SIDES = ("chosen", "rejected")


def orpo_loss(final: Path, folder: Path) -> float:
    """Return the mean over the held-out pairs of the answer's own loss and beta times the odds ratio's."""
    policy, losses = Scorer(final), []
    for row in rows_of(folder / "held_out_pairs.jsonl"):
        chosen, rejected = (total / count for total, count in (policy(row["prompt"], row[side]) for side in SIDES))
        odds = [mean - torch.log1p(-mean.exp()) for mean in (chosen, rejected)]
        losses.append(-chosen - BETA * logsigmoid(odds[0] - odds[1]))
    return float(torch.stack(losses).mean())


def kto_loss(final: Path, folder: Path) -> float:
    """Return the mean of `1 - s(+-beta (ratio - z))`; z is of the prompts with the next row's answer each."""
    policy, reference = Scorer(final), Scorer(folder / "base")
    rows = rows_of(folder / "held_out_judged.jsonl")

    def ratio(prompt: str, answer: str) -> torch.Tensor:
        return policy(prompt, answer)[0] - reference(prompt, answer)[0]

    others = [rows[(place + 1) % len(rows)] for place in range(len(rows))]
    pairs = zip(rows, others, strict=True)
    z = torch.stack([ratio(row["prompt"], other["completion"]) for row, other in pairs]).mean().clamp(min=0)
    signs = [1 if row["label"] else -1 for row in rows]
    ratios = [ratio(row["prompt"], row["completion"]) for row in rows]
    return float(sum(1 - sigmoid(BETA * s * (r - z)) for s, r in zip(signs, ratios, strict=True)) / len(rows))


def reward_loss(final: Path, folder: Path) -> float:
    """Return the mean of `-log s(c - r - margin) + 0.1 (c + r)^2` over the held-out pairs."""
    tokenizer, losses = AutoTokenizer.from_pretrained(final), []
    model = _scoring(final, folder / "base").eval()
    for row in rows_of(folder / "held_out_pairs.jsonl"):
        with torch.no_grad():
            scores = [model(tokens_of(tokenizer, row["prompt"], row[side])[0]).logits[0, 0].double() for side in SIDES]
        losses.append(-logsigmoid(scores[0] - scores[1] - row["margin"]) + 0.1 * (scores[0] + scores[1]) ** 2)
    return float(torch.stack(losses).mean())


def _scoring(final: Path, base: Path) -> torch.nn.Module:
    """Return the model of the folder, or the base with the adapter there: its `config` knows of the one score."""
    if not (final / "adapter_config.json").exists():
        return AutoModelForSequenceClassification.from_pretrained(final)
    config = AutoConfig.from_pretrained(final / "config")
    return PeftModel.from_pretrained(AutoModelForSequenceClassification.from_pretrained(base, config=config), final)


def case(name: str, written: str, reload: Callable[[Path, Path], float], *variants: str) -> Case:
    every = {"full": (), "lora": LORA}
    return Case(name, written, prepare, "loss", reload, {each: every[each] for each in variants or every})


def preferring(loss: str, **more: float) -> str:
    settings = "".join(f", {name}: {value}" for name, value in more.items())
    return f"{{name: preference, preference: {{loss: {loss}, beta: {BETA}{settings}}}}}"


CASES = (
    case("dpo", job("dpo", preferring("sigmoid")), dpo_loss),
    case("orpo", job("orpo", preferring("orpo")), orpo_loss, "full"),
    case("kto", job("kto", preferring("kto"), form="judged", rows="judged"), kto_loss),
    case("reward", job("reward", "{name: reward, reward: {use_margin: true, centering: 0.1}}"), reward_loss),
)
