"""What it costs that data are verified: `python verification.py [FOLDER]`, about ten minutes on two cores.

- Steps: two loaders over one prepared set take the same steps in turns, one with the marks of samples made, added up
  and compared as in training, one without all that. CPU time of this thread, medians of the paired differences.
- Starts: processes that start the same job with its set found in the cache, with and without verification, in turns, to
  the end of their first step. CPU time of the whole process, medians of the paired ratios.
- Sets: how long it takes to verify one of 10^7 and of 10^8 tokens that lies in the page cache.

Without verification means that functions are replaced here: no key of a job switches it off.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tiny_job import WORDS, write_job

from finetune.config.load import load_config
from finetune.data import delivery
from finetune.data.batch import Batch
from finetune.data.delivery import Delivery, DeliveryCheck
from finetune.data.loader import groups, train_loader
from finetune.data.token_cache.arrays import StoredArray, Verification
from finetune.data.token_cache.build import PreparedSetWriter
from finetune.data.token_cache.chunks import Chunk
from finetune.data.token_cache.counts import Counts
from finetune.data.token_cache.store import Identity, PreparedSet
from finetune.report.run_log import RunLog
from finetune.run.build.data import make_training_data
from finetune.run.train import train_from_config
from finetune.train import loop

NUM_ROWS, MEAN_WORDS = 4000, 60
BATCHES = (8, 64, 512)
ROUNDS, STARTS = 200, 12
SAMPLES, TOKENS = 10_000, 200
STEP_SECONDS = 0.1
"""The step of which the cost is told as a share."""


def main(folder: Path) -> None:
    """Measure and print."""
    job = write_job(folder)
    chance = random.Random(1)
    rows = [{"prompt": _text(chance), "completion": _text(chance)} for _ in range(NUM_ROWS)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for size in BATCHES:
        extra = steps(job, size)
        print(f"a step of {size} samples: {extra * 1e6:.0f} us more, {extra / STEP_SECONDS:.2%} of {STEP_SECONDS:g} s")
    on, off = starts(job)
    ratios = [one / other for one, other in zip(on, off, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    print(f"a start: {statistics.median(on):.2f} CPU-s with, {statistics.median(off):.2f} without")
    print(f"  ratio {statistics.median(ratios):.3f} (quartiles {low:.3f} to {high:.3f}) over {STARTS} pairs")
    for exponent in (7, 8):
        print(f"a set of 10^{exponent} tokens: verified in {verified(folder / f'set{exponent}', 10**exponent):.3f} s")


def _text(chance: random.Random) -> str:
    return " ".join(chance.choices(WORDS, k=max(1, int(chance.lognormvariate(0, 0.6) * MEAN_WORDS))))


def steps(job: Path, size: int) -> float:
    """Return the CPU-seconds that a step of so many samples takes more with verification."""
    overrides = [
        f"train.global_batch_size={size}",
        "train.microbatch_size=8",
        "data.max_length=1024",
        "train.steps=900",
    ]
    config = load_config(job, [*overrides, "data.num_workers=0"]).config
    lessons = make_training_data(config, RunLog(is_main=False))
    deliveries = DeliveryCheck(lessons.training, size)
    marked = delivery.with_checksums

    def one() -> Iterator[tuple[Batch, ...]]:
        loader = train_loader(
            lessons.training,
            lessons.task.collate,
            global_batch_size=size,
            microbatch_size=8,
            first_step=0,
            num_steps=900,
            section=config.data,
        )
        return groups(loader, size // 8)

    def step(verifies: bool, number: int, from_loader: Iterator[tuple[Batch, ...]]) -> float:
        delivery.with_checksums = marked if verifies else lambda batch, features: batch
        started = time.thread_time()
        group = next(from_loader)
        if verifies:
            assert deliveries.received(group).mark == deliveries.expected(number)
        else:
            lessons.training.order.samples(number * size, (number + 1) * size)
        return time.thread_time() - started

    both = {True: one(), False: one()}
    differences = []
    for number in range(ROUNDS if size < 100 else ROUNDS // 4):
        turn = (True, False) if number % 2 else (False, True)
        taken = {verifies: step(verifies, number, both[verifies]) for verifies in turn}
        differences.append(taken[True] - taken[False])
    delivery.with_checksums = marked
    return statistics.median(differences[5:])


def starts(job: Path) -> tuple[list[float], list[float]]:
    """Return the CPU-seconds of starts with and without verification, pair by pair."""
    taken: dict[str, list[float]] = {"on": [], "off": []}
    for number in range(STARTS + 1):
        for way in ("on", "off") if number % 2 else ("off", "on"):
            command = [sys.executable, __file__, way, str(job), str(job.parent / "runs" / f"{way}{number}")]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            assert process.returncode == 0
            taken[way].append(used.ru_utime + used.ru_stime)
    return taken["on"][1:], taken["off"][1:]


def start(way: str, job: Path, folder: Path) -> None:
    """Start the job as a process of its own, and end after its first step."""
    if way == "off":
        _verify_nothing()
    advance = loop.advance

    def and_end(*arguments: Any) -> None:
        advance(*arguments)
        os._exit(0)

    loop.advance = and_end
    train_from_config(load_config(job, [f"run.folder={folder}", "data.max_length=1024"]))


def _verify_nothing() -> None:
    def nothing(*_: object) -> None:
        """Verify nothing."""

    StoredArray.verify_block = nothing  # type: ignore[method-assign]
    Verification.run = nothing  # type: ignore[method-assign]
    delivery.with_checksums = lambda batch, features: batch
    DeliveryCheck.received = lambda self, group: Delivery(0)  # type: ignore[method-assign]
    DeliveryCheck.expected = lambda self, step: 0  # type: ignore[method-assign]


def verified(folder: Path, num_tokens: int) -> float:
    """Return how long it takes to verify a set of so many tokens, which is made here."""
    folder.mkdir()
    writer = PreparedSetWriter(folder, Identity("f", {}))
    tokens = np.random.default_rng(0).integers(0, 32_000, SAMPLES * TOKENS, dtype=np.uint32)
    lengths, each = np.full(SAMPLES, TOKENS), np.arange(SAMPLES)
    chunk = Chunk(
        values={"input_ids": tokens, "is_target": tokens % 2 == 0},
        lengths={"input_ids": lengths, "is_target": lengths},
        num_targets=np.full(SAMPLES, TOKENS // 2, np.int32),
        digests=each.astype(np.uint64),
        checksums=each.astype(np.uint64),
        row_numbers=each,
        origins=((0, "generated"),),
        counts=Counts(rows=SAMPLES, samples=SAMPLES, tokens=len(tokens)),
    )
    for _ in range(num_tokens // len(tokens)):
        writer.append(chunk)
    writer.finish()
    writer.close()
    started = time.perf_counter()
    PreparedSet(folder).verify()
    return time.perf_counter() - started


if __name__ == "__main__":
    if len(sys.argv) == 4:
        start(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    elif len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
