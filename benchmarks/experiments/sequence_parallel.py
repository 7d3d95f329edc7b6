"""Rows that 2 and 4 gloo ranks share against whole rows, for every model type that is known to allow it: a table.

python benchmarks/experiments/sequence_parallel.py
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from finetune.model.attention.supported_models import PLAIN_MODEL_TYPES, SINK_MODEL_TYPES
from finetune.runtime.processes import free_port

ROOT = Path(__file__).parents[2]
DEGREES = "2,4"
BESIDES = ("adapted", "checkpointed", "keys-of-one", "three-heads")


def run(program: str, *words: str) -> dict[str, dict[str, float]]:
    """Return what the program has found on 4 ranks."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        ranks = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=4", f"--master_port={free_port()}"]
        subprocess.run([*ranks, "-m", program, str(file), *words], check=True, stderr=subprocess.DEVNULL, cwd=ROOT)
        found: dict[str, dict[str, float]] = json.loads(file.read_text())
        return found


def main() -> None:
    """Print the tables of the losses and gradients, and of the memory."""
    kinds = sorted(PLAIN_MODEL_TYPES | SINK_MODEL_TYPES) + list(BESIDES)
    found = run("tests.scenarios.strategies.slices_program", DEGREES, *kinds)
    print("| model | degree | loss, relative | gradient |\n|---|---|---|---|")
    for name, each in sorted(found.items()):
        kind, degree = name.split("/")
        print(f"| {kind} | {degree} | {each['loss']:.1e} | {each['gradient']:.1e} |")
    print("\n| model | one rank, T tokens | each of 4 ranks, 4 T tokens | ratio |\n|---|---|---|---|")
    for name, each in run("tests.scenarios.strategies.slices_memory_program").items():
        alone, shared = each["alone"], each["shared"]
        print(f"| {name} | {alone / 1e6:.1f} MB | {shared / 1e6:.1f} MB | {shared / alone:.3f} |")


if __name__ == "__main__":
    main()
