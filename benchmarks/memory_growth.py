"""Peak memory of a rank on CPUs after many steps of varying lengths, and the CPU time of a step.

    python benchmarks/memory_growth.py [--steps 2000] [--only one ddp fsdp2 zero2] [--trees . ../before] [--minilm DIR]

A classifier with LoRA, rows of 20 to 256 tokens, batch 32: every step meets lengths that no step before has met.
Several `--trees` (checkouts of this repository) are run one after the other, strategy by strategy: their losses must be
equal bit by bit, else the exit code is 1. The encoder is a tiny BERT, or the one in the folder DIR.
Results: experiments/memory_growth.md.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
NUM_PROCESSES = {"one": 1, "ddp": 2, "fsdp2": 2, "zero2": 2}
MARKS = (100, 500, 1000, 2000)
TINY_BERT = {
    "from_config": {
        "model_type": "bert",
        "values": {
            **{"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2},
            "max_position_embeddings": 512,
        },
    },
    "tokenizer": {"train": {"vocabulary_size": 512}},
}


@dataclass(frozen=True)
class Grown:
    """What a run has measured: the peak of its main rank by step, its losses, and the CPU time of a step."""

    peaks: dict[int, int]
    losses: list[float]
    cpu_seconds: float

    @property
    def growth(self) -> float:
        """Return the last peak over that of the first 100 steps."""
        return self.peaks[max(self.peaks)] / self.peaks[min(self.peaks)]


def write_job(folder: Path, *, steps: int, minilm: str | None = None) -> Path:
    """Write the rows and the job into the folder; return the job's file."""
    chance = random.Random(1)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=3)) for _ in range(300)]
    with (folder / "rows.jsonl").open("w") as file:
        for _ in range(4_000):
            text = " ".join(chance.choices(words, k=chance.randint(10, 120)))
            file.write(json.dumps({"text": text, "label": chance.randrange(4)}) + "\n")
    job = {
        "run": {"folder": "run", "seed": 1},
        "model": {**({"name": minilm} if minilm else TINY_BERT), "lora": {"rank": 8, "alpha": 16.0}},
        "data": {"train": {"path": "rows.jsonl"}, "max_length": 256, "over_length": "truncate"},
        "task": {"name": "text_classification"},
        "train": {"global_batch_size": 32, "microbatch_size": 16, "steps": steps, "learning_rate": 1e-4},
        "checkpoint": {"every_steps": steps},
        "report": {"console": "plain", "log_every_steps": 20},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder / "job.yaml"


def grow(strategy: str, *, steps: int, tree: Path = ROOT, minilm: str | None = None) -> Grown:
    """Run the job of so many steps in a fresh folder under the strategy."""
    with tempfile.TemporaryDirectory() as folder:
        job = write_job(Path(folder), steps=steps, minilm=minilm)
        launch = [sys.executable]
        if (processes := NUM_PROCESSES[strategy]) > 1:
            launch += ["-m", "accelerate.commands.launch", "--num_processes", str(processes)]
            launch += ["--config_file", f"{tree}/accelerate_configs/{strategy}.yaml"]
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [*launch, "-m", "finetune", "--config", str(job)]
        done = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        events = [json.loads(line) for line in Path(folder, "run", "events.jsonl").read_text().splitlines()]
    taken = {each["step"]: each for each in events if "memory_bytes" in each and "step" in each}
    marks = sorted({min(mark, steps) for mark in MARKS})
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Grown(
        {mark: taken[mark]["memory_bytes"] for mark in marks}, [e["loss"] for e in taken.values()], cpu / steps
    )


def main() -> None:
    """Print a row for each strategy and tree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=MARKS[-1])
    parser.add_argument("--only", nargs="+", choices=NUM_PROCESSES, default=list(NUM_PROCESSES))
    parser.add_argument("--trees", nargs="+", type=Path, default=[ROOT])
    parser.add_argument("--minilm", metavar="DIR")
    options = parser.parse_args()
    marks = sorted({min(mark, options.steps) for mark in MARKS})
    print("| strategy | tree |", " | ".join(f"MB at {mark}" for mark in marks), "| growth | CPU ms a step |")
    print("|---" * (len(marks) + 4) + "|")
    is_equal = True
    for strategy in options.only:
        losses = []
        for tree in options.trees:
            grown = grow(strategy, steps=options.steps, tree=tree.resolve(), minilm=options.minilm)
            sizes = " | ".join(f"{each / 1e6:.0f}" for each in grown.peaks.values())
            print(f"| {strategy} | {tree} | {sizes} | {grown.growth:.2f} | {grown.cpu_seconds * 1e3:.0f} |", flush=True)
            losses.append(grown.losses)
        is_equal &= all(each == losses[0] for each in losses)
    print("losses are equal bit by bit" if is_equal else "losses differ")
    sys.exit(0 if is_equal else 1)


if __name__ == "__main__":
    main()
