"""Does DPO after SFT teach a small model which of two real answers people prefer? On hh-rlhf's harmless pairs.

    python benchmarks/experiments/preferences.py [--data ../shared/data/hh-rlhf/harmless-base-test.jsonl.gz] [--quick]

A small llama with random weights trains on the chosen answers (`sft`), then on the pairs (`preference`, from the
`final/` of the first job). The script prints on how many held-out pairs the chosen answer is likelier under the SFT
model, and on how many its implicit reward is the higher one; each with Wilson's 95% interval. Both are computed from
the exported folders with transformers alone. Exits 1 where the reward's interval contains chance (0.5).
"""

import argparse
import gzip
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data" / "hh-rlhf" / "harmless-base-test.jsonl.gz"
HELD_OUT = 700
LENGTH = 192

SFT = """
run: {{folder: sft, seed: 1}}
model:
  from_config:
    model_type: llama
    values:
      {{hidden_size: 128, intermediate_size: 384, num_hidden_layers: 2, num_attention_heads: 4,
       num_key_value_heads: 4, tie_word_embeddings: true, max_position_embeddings: 512}}
  tokenizer: {{train: {{vocabulary_size: 4096}}}}
data:
  train: {{path: answers.jsonl, format: messages}}
  max_length: {length}
  over_length: truncate
  truncate_side: start
  train_on: last_assistant
  chat_template: chatml
  no_target: drop
  cache_folder: cache
task: {{name: sft}}
train:
  {{global_batch_size: 16, microbatch_size: 16, epochs: {sft_epochs}, learning_rate: 3e-3,
   schedule: {{name: cosine, warmup_fraction: 0.05}}}}
report: {{console: plain, log_every_steps: 20}}
"""

DPO = """
run: {{folder: dpo, seed: 1}}
model: {{name: ./sft/final}}
data:
  train: {{path: pairs.jsonl, format: preference}}
  validation: {{path: held_out.jsonl, format: preference}}
  max_length: {length}
  over_length: truncate
  truncate_side: start
  no_target: drop
  cache_folder: cache
task: {{name: preference, preference: {{loss: sigmoid, beta: {beta}}}}}
train:
  {{global_batch_size: 16, microbatch_size: 16, epochs: {dpo_epochs}, learning_rate: {rate},
   schedule: {{name: cosine, warmup_fraction: 0.1}}}}
evaluate: {{every_steps: 40}}
report: {{console: plain, log_every_steps: 20}}
"""


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        pairs = list(conversations(options.data))
        random.Random(0).shuffle(pairs)
        pairs = pairs[: 400 if options.quick else None]
        num_held_out = 100 if options.quick else HELD_OUT
        held_out, training = pairs[:num_held_out], pairs[num_held_out:]
        _write(folder / "held_out.jsonl", held_out)
        _write(folder / "pairs.jsonl", training)
        _write(folder / "answers.jsonl", [{"messages": [*each["prompt"], *each["chosen"]]} for each in training])
        settings = {
            "length": LENGTH,
            "sft_epochs": 1 if options.quick else options.sft_epochs,
            "dpo_epochs": 1 if options.quick else options.dpo_epochs,
            "beta": options.beta,
            "rate": options.rate,
        }
        print(f"{len(training):,} pairs to train on, {len(held_out):,} held out", flush=True)
        for name, job in (("sft", SFT), ("dpo", DPO)):
            (folder / f"{name}.yaml").write_text(job.format(**settings))
            _train(folder, name)
        return _report(folder, held_out)


def conversations(path: Path) -> Iterator[dict]:
    """Yield pairs as turns; of both transcripts, only the last answer may differ."""
    with gzip.open(path, "rt") as file:
        for line in file:
            row = json.loads(line)
            chosen, rejected = turns(row["chosen"]), turns(row["rejected"])
            if chosen[:-1] == rejected[:-1] and chosen[-1] != rejected[-1] and chosen[-1]["role"] == "assistant":
                yield {"prompt": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]}


def turns(transcript: str) -> list[dict]:
    r"""Return the turns of `\n\nHuman: ...\n\nAssistant: ...`."""
    parts = re.split(r"\n\n(Human|Assistant):", transcript)[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[role], "content": content.strip()} for role, content in zip(parts[::2], parts[1::2], strict=True)
    ]


def _write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _train(folder: Path, name: str) -> None:
    started = time.monotonic()
    command = [sys.executable, "-m", "finetune", "train", "--config", f"{name}.yaml"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    (folder / f"{name}.log").write_text(ended.stdout + ended.stderr)
    if ended.returncode != 0:
        sys.exit(f"{name} failed:\n{(ended.stdout + ended.stderr)[-3000:]}")
    print(f"{name} took {time.monotonic() - started:.0f} s", flush=True)


def _report(folder: Path, held_out: list[dict]) -> int:
    sft, dpo = (log_probabilities(folder / name / "final", held_out) for name in ("sft", "dpo"))
    is_whole = ~sft.isnan().any(dim=0)
    sft, dpo = sft[:, is_whole], dpo[:, is_whole]
    likelier = sft[0] > sft[1]
    preferred = (dpo - sft)[0] > (dpo - sft)[1]
    for title, right in (("SFT: chosen is likelier", likelier), ("DPO: chosen has the higher reward", preferred)):
        low, high = wilson(int(right.sum()), len(right))
        print(f"{title:<36}{right.float().mean():.1%} of {len(right)} held-out pairs (95%: {low:.1%} to {high:.1%})")
    low, _ = wilson(int(preferred.sum()), len(preferred))
    margin = (dpo - sft)[0] - (dpo - sft)[1]
    print(f"mean difference of the rewards / beta: {margin.mean():.3f} +- {margin.std() / math.sqrt(len(margin)):.3f}")
    return 0 if low > 0.5 else 1


def log_probabilities(folder: Path, pairs: list[dict]) -> torch.Tensor:
    """Return the log-probability of the chosen and of the rejected answers, [2, pairs], their prompts cut alike.

    NaN where nothing is left of an answer: such pairs were dropped by the job, too.
    """
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    values = torch.zeros(2, len(pairs), dtype=torch.float64)
    for place, pair in enumerate(pairs):
        asked = tokenizer.apply_chat_template(pair["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
        whole = [
            tokenizer.apply_chat_template([*pair["prompt"], *pair[side]], return_dict=True)["input_ids"]
            for side in ("chosen", "rejected")
        ]
        cut = max(0, max(map(len, whole)) - LENGTH)
        for side, ids in enumerate(whole):
            ids_left = torch.tensor(ids[cut : len(ids) - ids[::-1].index(end)])  # up to the end of the turn
            start = max(1, len(asked) - cut)
            if start >= len(ids_left):
                values[:, place] = math.nan
                break
            with torch.no_grad():
                each = model(ids_left[None]).logits[0].log_softmax(-1)[start - 1 : -1]
            values[side, place] = each.gather(1, ids_left[start:, None]).sum()
    return values


def wilson(right: int, of: int, *, z: float = 1.96) -> tuple[float, float]:
    """Return Wilson's interval of a share (Wilson, 1927)."""
    share, spread = right / of, z * z / of
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / of + spread / (4 * of)) / (1 + spread)
    return centre - half, centre + half


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--quick", action="store_true", help="400 pairs, one pass each: only shows that it runs")
    parser.add_argument("--keep", type=Path, help="keep rows, jobs and runs in this folder")
    parser.add_argument("--sft-epochs", type=float, default=2)
    parser.add_argument("--dpo-epochs", type=float, default=1)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--rate", type=float, default=5e-4)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
