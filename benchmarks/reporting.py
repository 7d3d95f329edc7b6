"""What reporting costs a step: the run's own reporters, fed with steps of 50 ms, against the same steps without any.

    python benchmarks/reporting.py [--steps 600] [--step-ms 50]

A step is matrix products of torch on one thread; every 10 steps are reported at once, as training does. Times are CPU
seconds of the whole process, so that threads of reporters count and other programs on the machine do not. Blocks with
and without reporters alternate; the median of their paired ratios is shown beside what was spent within the reporters
on the training thread and in threads of their own. The last page of the report is paid once in a run.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from finetune.config.sections.report import ReportSection
from finetune.report.build import build_reporter
from finetune.report.events import Answered, Evaluated, RunEnded, RunStarted, StepTaken
from finetune.report.reporter import NullReporter, Reporter

LOG_EVERY, BLOCK = 10, 20


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--steps", type=int, default=600)
    words.add_argument("--step-ms", type=float, default=50.0)
    asked = words.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), num_steps=asked.steps, step_seconds=asked.step_ms / 1000)


def measure(folder: Path, *, num_steps: int, step_seconds: float) -> None:
    section = ReportSection(console="plain", log_every_steps=LOG_EVERY)
    accelerator = SimpleNamespace(trackers=[])  # without trackers it is not asked for anything
    reporter = build_reporter(section, run_folder=folder, accelerator=accelerator, is_main=True)
    silent, work = NullReporter(), products_for(step_seconds)
    reporter(RunStarted(0, num_steps, "single on 1 process", ("batch: 64 = 1 process x 64",), {}))
    reporter(Answered(0, "prompt", "answer", "reference"))
    times: dict[str, list[float]] = {"without": [], "with": []}
    in_reporters, own_before = 0.0, time.process_time() - time.thread_time()
    for first in range(0, 2 * num_steps, 2 * BLOCK):
        order = ["without", "with"] if (first // (2 * BLOCK)) % 2 else ["with", "without"]
        for name in order:
            seconds, inside = block(reporter if name == "with" else silent, first // 2, work=work)
            times[name].append(seconds / BLOCK)
            in_reporters += inside if name == "with" else 0.0
    in_threads = time.process_time() - time.thread_time() - own_before
    began = time.perf_counter()
    reporter(RunEnded(num_steps, "finished", 1.0, {}, None))
    reporter.close()
    parts = {
        "on the training thread": in_reporters / num_steps,
        "in other threads": in_threads / (2 * num_steps),
    }  # they work in all blocks
    show(times, parts, last=time.perf_counter() - began, folder=folder)


def block(reporter: Reporter, first: int, *, work: int) -> tuple[float, float]:
    """Return the seconds of a block of steps, and those spent within the reporters."""
    began, inside = time.process_time(), 0.0
    for step in range(first + 1, first + BLOCK + 1):
        compute(work)
        if step % LOG_EVERY == 0:
            before = time.thread_time()
            for each in range(step - LOG_EVERY + 1, step + 1):
                reporter(event(each))
            if step % 100 == 0:
                reporter(Evaluated(step, {"loss": 1.0}, 100, 1.0))
            inside += time.thread_time() - before
    return time.process_time() - began, inside


def event(step: int) -> StepTaken:
    return StepTaken(
        step,
        1.0 + 1 / step,
        1.0,
        1e-3,
        1000,
        4000,
        "ab" * 32,
        step / 100,
        0.05,
        0.001,
        0.02,
        1 << 30,
        {"accuracy": 0.5},
    )


def compute(work: int) -> None:
    matrix = torch.ones(256, 256)
    for _ in range(work):
        torch.mm(matrix, matrix)


def products_for(seconds: float) -> int:
    """Return how many products take so long."""
    compute(50)
    began = time.process_time()
    compute(200)
    return max(1, round(200 * seconds / (time.process_time() - began)))


def show(times: dict[str, list[float]], parts: dict[str, float], *, last: float, folder: Path) -> None:
    without, reported = (statistics.median(times[name]) for name in ("without", "with"))
    ratio = statistics.median(ours / theirs for ours, theirs in zip(times["with"], times["without"], strict=True))
    print(f"a step without reporters  {1000 * without:8.3f} ms")
    print(
        f"a step with them          {1000 * reported:8.3f} ms  ({ratio - 1:+.2%}, {len(times['with'])} paired blocks)"
    )
    for name, seconds in (*parts.items(), ("together", sum(parts.values()))):
        print(f"{name:<25} {1000 * seconds:8.3f} ms a step  ({seconds / without:.2%})")
    print(f"the last page             {1000 * last:8.1f} ms, once; {(folder / 'report.html').stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
