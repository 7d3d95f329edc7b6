"""How fast rows become a prepared set: against `datasets.map` and TRL, from 10^4 to 10^6 rows, and what opening costs.

    python benchmarks/prepare.py [--quick] [--rounds 5] [--rows 10000] [--workers 1,2] [--scale 10000,100000,1000000]

Every measurement is a process of its own; the contestants of a round come in an order that is drawn anew. All have the
same generated conversations, tokenizer, template and number of processes. `map` only renders and tokenises, a batch at
a time; `trl` is SFTTrainer's own preparation (`_prepare_dataset`) of the same turns as prompt and completion; both read
the JSON through `load_dataset`, as their users do. CPU-seconds are of a process and its children, imports apart.
"""

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from finetune.data.encoding.chat import BUILT_IN
from finetune.model.byte_pairs import trained_tokenizer
from finetune.runtime.amounts import size_text

WORKER = Path(__file__).with_name("prepare_worker.py")
ROWS_WITH_WORKERS = 6
"""So many times the rows where there are processes to start: a small set starts none."""
CONTESTANTS = ("ours", "map", "trl")


def main() -> int:
    """Measure and print three tables."""
    options = _options()
    packages = ", ".join(f"{name} {version(name)}" for name in ("datasets", "trl", "transformers", "tokenizers"))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {packages}")
    with tempfile.TemporaryDirectory(prefix="finetune-prepare-", dir=options.folder) as scratch:
        bench = Bench(Path(scratch))
        for workers in map(int, options.workers.split(",")):
            rows = options.rows * (1 if workers == 1 else ROWS_WITH_WORKERS)
            _print_contest(bench.contest(rows, workers=workers, rounds=options.rounds), workers=workers)
        _print_scale({rows: bench.run("ours", rows, workers=1) for rows in map(int, options.scale.split(","))})
        _print_opening(bench)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about two minutes: fewer rows and rounds")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--rows", type=int, help="of the contest")
    parser.add_argument("--workers", help="numbers of processes")
    parser.add_argument("--scale", help="numbers of rows")
    parser.add_argument("--folder", help="where to write; a folder of its own in it is made and removed")
    options = parser.parse_args()
    usual = {"rounds": 5, "rows": 10_000, "workers": "1,2", "scale": "10000,100000,1000000"}
    quick = {"rounds": 2, "rows": 5_000, "workers": "1", "scale": "5000,50000"}
    for name, value in (quick if options.quick else usual).items():
        setattr(options, name, getattr(options, name) or value)
    return options


class Bench:
    """Runs contestants on generated rows."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.tokenizer = scratch / "tokenizer"
        tokenizer = trained_tokenizer(
            lambda: (turn["content"] for turns in _conversations(20_000) for turn in turns),
            vocabulary_size=8_000,
            cache_folder=scratch,
            say=lambda line: None,
        )
        tokenizer.chat_template = BUILT_IN["chatml"].read_text()
        tokenizer.save_pretrained(self.tokenizer)

    def contest(self, rows: int, *, workers: int, rounds: int) -> dict[str, list[dict[str, Any]]]:
        """Return what each contestant did in each round."""
        results = defaultdict(list)
        for number in range(rounds):
            for who in random.Random(number).sample(CONTESTANTS, len(CONTESTANTS)):
                results[who].append(self.run(who, rows, workers=workers))
        return results

    def run(self, who: str, rows: int, *, workers: int) -> dict[str, Any]:
        """Return what a fresh process measured."""
        folder = self.scratch / "work"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        result = self.told(who, self._file(rows, is_pair=who == "trl"), workers, folder)
        shutil.rmtree(folder)
        return result

    def told(self, who: str, file: Path, workers: int, folder: Path) -> dict[str, Any]:
        """Return what the worker prints."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, str(WORKER), who, str(file), str(self.tokenizer), str(workers), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise SystemExit(f"{who}: exit code {done.returncode}\n{done.stderr[-3000:]}")
        return dict(json.loads(done.stdout.splitlines()[-1]))

    def _file(self, rows: int, *, is_pair: bool) -> Path:
        path = self.scratch / f"{'pairs' if is_pair else 'turns'}-{rows}.jsonl"
        if not path.exists():
            with path.open("w") as file:
                for turns in _conversations(rows):
                    row = {"prompt": turns[:1], "completion": turns[1:]} if is_pair else {"messages": turns}
                    file.write(json.dumps(row) + "\n")
        return path


def _conversations(number: int) -> Iterator[list[dict[str, str]]]:
    """Yield conversations of two turns, of some 100 tokens, words as frequent as in a language (Zipf)."""
    chance = random.Random(7)
    words = ["".join(chance.choices("etaoinshrdlucmfw", k=chance.randint(2, 9))) for _ in range(5_000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    drawn = chance.choices(words, weights, k=200_000)
    for _ in range(number):
        start, asked, answered = chance.randrange(199_000), chance.randint(5, 40), chance.randint(5, 60)
        text = drawn[start : start + asked + answered]
        yield [
            {"role": "user", "content": " ".join(text[:asked])},
            {"role": "assistant", "content": " ".join(text[asked:]) + "."},
        ]


def _print_contest(results: dict[str, list[dict[str, Any]]], *, workers: int) -> None:
    ours = results["ours"]
    print(f"\n{workers} process{'es' * (workers > 1)}, {len(ours)} rounds; medians, ratios paired within a round\n")
    print(
        "| who | tokens | CPU s | wall s | CPU / ours | wall / ours | largest process |\n|---|---|---|---|---|---|---|"
    )
    for who in CONTESTANTS:
        each = results[who]
        ratios = {
            name: median(other[name] / mine[name] for other, mine in zip(each, ours, strict=True))
            for name in ("cpu", "wall")
        }
        middle = {name: median(one[name] for one in each) for name in ("cpu", "wall", "peak_bytes")}
        print(
            f"| {who} | {each[0]['tokens']:,} | {middle['cpu']:.2f} | {middle['wall']:.2f} | {ratios['cpu']:.2f} "
            f"| {ratios['wall']:.2f} | {size_text(int(middle['peak_bytes']))} |"
        )


def _print_scale(results: dict[int, dict[str, Any]]) -> None:
    print("\nours, one process\n\n| rows | tokens | CPU s | CPU microseconds per row | peak memory |")
    print("|---|---|---|---|---|")
    for rows, told in results.items():
        each = told["cpu"] / rows * 1e6
        print(f"| {rows:,} | {told['tokens']:,} | {told['cpu']:.1f} | {each:.0f} | {size_text(told['peak_bytes'])} |")


def _print_opening(bench: Bench) -> None:
    folder = bench.scratch / "generated"
    folder.mkdir()
    written = bench.told("write", folder, 1, folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"\na set of 10^8 generated tokens ({size_text(size)} on disk), written in {written['wall']:.1f} s\n")
    print("| opened in | resident memory by it | one sample at random |\n|---|---|---|")
    for _ in range(3):
        told = bench.told("open", folder, 1, folder)
        print(
            f"| {told['open_seconds'] * 1000:.1f} ms | {size_text(told['open_bytes'])} "
            f"| {told['microseconds_per_sample']:.1f} microseconds |"
        )


if __name__ == "__main__":
    sys.exit(main())
