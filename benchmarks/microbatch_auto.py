"""`train.microbatch_size: auto` against the best size found by hand, under a limit of each rank's memory.

    python -m benchmarks.microbatch_auto [CASE ...]

Each rank may take so many MiB more than it has before the first step (RLIMIT_DATA, beyond which torch's allocator
refuses). `auto` is launched twice: the second start resumes after step 1. Then every larger size is launched by hand
with `train.try_longest_batch: never`, from the chosen one on, until one is out of memory; 10 steps with a checkpoint at
each, since the first few may fit where the longest batch does not. Prints a table in Markdown.
"""

import json
import random
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from finetune.config.load import load_config
from finetune.config.run_config import possible_microbatch_sizes
from tests import launching

JOB = """
run: {folder: runs/job, seed: 7}
model:
  from_config:
    model_type: llama
    values:
      {hidden_size: 256, intermediate_size: 704, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2,
       tie_word_embeddings: true}
  tokenizer: {train: {vocabulary_size: 320}}
data:
  train: {path: train.jsonl}
  max_length: 256
  chat_template: chatml
  cache_folder: cache
task: {name: sft}
train: {global_batch_size: 48, microbatch_size: auto, steps: 10, learning_rate: 1e-3}
checkpoint: {every_steps: 1}
report: {console: plain, log_every_steps: 1}
export: {verify: false}
"""
WORDS = ["red", "green", "blue", "amber", "violet", "white", "black", "grey", "pink", "brown"]
PADDED = "data.batching.padding_free=false"


@dataclass(frozen=True)
class Case:
    strategy: str
    processes: int
    megabytes: str  # of each rank, or of rank 0, rank 1, ...
    overrides: tuple[str, ...] = ()


CASES = {
    "single": Case("single", 1, "400"),
    "single, 30 = odd divisors": Case("single", 1, "350", ("train.global_batch_size=30",)),
    "single, LoRA, padded": Case("single", 1, "400", ("model.lora={rank: 4, dropout: 0.1}", PADDED)),
    "ddp, 2": Case("ddp", 2, "400"),
    "ddp, 2, rank 1 has less": Case("ddp", 2, "600,300"),
    "ddp, 2, 30 = odd divisors": Case("ddp", 2, "350", ("train.global_batch_size=30",)),
    "ddp, 3": Case("ddp", 3, "350"),
    "fsdp2, 2": Case("fsdp2", 2, "400"),
    "fsdp2, 2, rank 1 has less": Case("fsdp2", 2, "600,300"),
    "fsdp2, 3, padded": Case("fsdp2", 3, "400", (PADDED,)),
    "zero2, 2": Case("zero2", 2, "400"),
    "zero3, 2": Case("zero3", 2, "400"),
    "zero3, 3, 30": Case("zero3", 3, "350", ("train.global_batch_size=30",)),
}


def prepare(folder: Path) -> None:
    chance = random.Random(1)
    rows = [chance.choices(WORDS, k=chance.randint(30, 60)) for _ in range(300)]
    turns = [[{"role": "user", "content": " ".join(row)}, {"role": "assistant", "content": row[0]}] for row in rows]
    (folder / "train.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    (folder / "job.yaml").write_text(JOB)


def run(folder: Path, case: Case, name: str, *overrides: str) -> tuple[int, str]:
    settings = [f"run.folder={folder / 'runs' / name}", *case.overrides, *overrides]
    words = ["-m", "tests.scenarios.memory.limited_program", case.megabytes, "--config", str(folder / "job.yaml")]
    words += [word for each in settings for word in ("--set", each)]
    log = folder / f"{name}.log"
    alone = case.processes == 1
    command = (
        [sys.executable, *words]
        if alone
        else launching.accelerate_command(case.strategy, *words, processes=case.processes)
    )
    code = launching.run(command, log=log, timeout_seconds=600, is_cold=True)
    return code, log.read_text(errors="replace")


def compare(folder: Path, title: str, case: Case) -> str:
    name = re.sub(r"\W+", "-", title)
    code, output = run(folder, case, name, "train.stop_after_steps=2")
    found = re.search(r"auto: (\d+).*\(tried ([\d, ]+) of ([\d, ]+)\)", output)
    if code != 0 or found is None:
        print(output[-3000:], file=sys.stderr)
        return f"| {title} | FAILED ({code}) |"
    size = int(found[1])
    again, resumed = run(folder, case, name)
    same = f"auto: {size}, as at the start" in resumed and again == 0
    config = load_config(folder / "job.yaml", case.overrides).config
    best = size
    for larger in possible_microbatch_sizes(config, num_processes=case.processes):
        if larger <= size:
            continue
        code, _ = run(
            folder, case, f"{name}-{larger}", f"train.microbatch_size={larger}", "train.try_longest_batch=never"
        )
        if code != 0:
            break
        best = larger
    return f"| {title} | {case.megabytes} | {found[3]} | {found[2]} | {size} | {best} | {'yes' if same else 'NO'} |"


def main() -> None:
    chosen = sys.argv[1:] or list(CASES)
    print("| case | MiB for a rank | sizes | tried | auto | best by hand | same on resume |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        prepare(Path(place))
        for title in chosen:
            print(compare(Path(place), title, CASES[title]), flush=True)


if __name__ == "__main__":
    main()
