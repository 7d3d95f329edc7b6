"""What watching a step costs: the events, the GPU columns, `/metrics` and the seam of a profile that is not open.

    python benchmarks/profiling.py [--rounds 25] [--check]

Each is called as a step calls it, a thousand times, in an order drawn anew every round, and counted in CPU time of the
process; the median over the rounds is set against a step of 50 ms. NVML is a stand-in that answers at once: what a
real one takes, its thread waits for without holding the interpreter. With --check the exit code is 1 where all of them
together cost 1% of such a step. Then a real job shows how much slower the steps inside a window are than those outside.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402  # the threads are set before

from finetune.config.load import load_config  # noqa: E402
from finetune.config.sections.report import ProfileSection  # noqa: E402
from finetune.report.events import JsonlReporter, StepTaken  # noqa: E402
from finetune.report.gpu import GpuSampler  # noqa: E402
from finetune.report.history import read_events  # noqa: E402
from finetune.report.profile import StepProfile  # noqa: E402
from finetune.report.prometheus import PrometheusReporter  # noqa: E402
from finetune.run.train import train_from_config  # noqa: E402
from finetune.runtime import distributed  # noqa: E402
from finetune.runtime.optional import no_op  # noqa: E402

STEP_SECONDS, THRESHOLD = 0.050, 0.01
CALLS, MICROBATCHES = 1000, 8
DEVICE = {"gpu_utilization": 0.9, "gpu_power_watts": 400.0, "gpu_temperature_celsius": 60.0}
EVENT = StepTaken(
    step=1,
    loss=2.0,
    gradient_norm=1.0,
    learning_rate=1e-4,
    num_targets=4096,
    num_tokens=8192,
    samples_sha256="ab" * 32,
    epoch=0.1,
    seconds=0.05,
    data_seconds=0.001,
    data_share=0.02,
    memory_bytes=1 << 30,
    device=DEVICE,
)
JOB = """
run: {folder: run, seed: 1}
model:
  from_config:
    model_type: llama
    values: {hidden_size: 128, intermediate_size: 352, num_hidden_layers: 4, num_attention_heads: 4}
  tokenizer: {train: {vocabulary_size: 320}}
data: {train: {path: train.jsonl}, max_length: 128, cache_folder: cache}
task: {name: pretrain}
train: {global_batch_size: 8, microbatch_size: 4, steps: 60, learning_rate: 1e-3}
report: {console: plain, log_every_steps: 60, profile: {start: 31, steps: 5}}
export: {verify: false}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        costs = measure(Path(folder), rounds=given.rounds)
        for name, seconds in costs.items():
            print(f"{name:<42} {1e6 * seconds:8.1f} us a step  {seconds / STEP_SECONDS:8.4%} of 50 ms")
        share = sum(costs.values()) / STEP_SECONDS
        print(f"{'together':<42} {1e6 * sum(costs.values()):8.1f} us a step  {share:8.4%} of 50 ms")
        print(f"a step inside a window takes {window_ratio(Path(folder)):.2f} times one outside (small model, CPU)")
    return int(given.check and share >= THRESHOLD)


def measure(folder: Path, *, rounds: int) -> dict[str, float]:
    """Return the CPU seconds that each takes of a step, the median over the rounds."""
    profile = StepProfile(
        ProfileSection(start=10**6),
        folder=folder,
        reporter=no_op,
        device=torch.device("cpu"),
    )
    sampler = GpuSampler(fake_nvml(), "0")
    per_second = STEP_SECONDS  # the sampler runs once a second, in the background
    parts: dict[str, tuple[Callable[[], object], float]] = {
        "an event in events.jsonl": (with_event(JsonlReporter(folder / "events.jsonl")), 1.0),
        "an event in /metrics": (with_event(PrometheusReporter(1, address="127.0.0.1", name="b", world=1)), 1.0),
        "the GPU columns, sampled in a thread": (sampler.sample, per_second),
        f"a closed profile, {MICROBATCHES} microbatches": (closed_profile(profile), 1.0),
    }
    spent: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(rounds):
        for name in random.sample(list(parts), len(parts)):
            call, weight = parts[name]
            started = time.process_time()
            for _ in range(CALLS):
                call()
            spent[name].append(weight * (time.process_time() - started) / CALLS)
    return {name: statistics.median(each) for name, each in spent.items()}


def with_event(reporter: Callable[[StepTaken], None]) -> Callable[[], object]:
    return lambda: reporter(EVENT)


def closed_profile(profile: StepProfile) -> Callable[[], object]:
    """Return the calls of a step, timed by a profile whose window is not open."""
    num_phases = 4 * MICROBATCHES + 10

    def step() -> None:
        for _ in range(num_phases):
            with profile.phase("forward"):
                pass
        profile.end_step(1)

    return step


def fake_nvml() -> SimpleNamespace:
    """Return an NVML with one GPU that answers at once."""
    field = SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=1))
    errors = ("NVMLError", "NVMLError_NotSupported", "NVMLError_FunctionNotFound", "NVMLError_NoPermission")
    return SimpleNamespace(
        **dict.fromkeys(errors, RuntimeError),
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: 0,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=90),
        nvmlDeviceGetPowerUsage=lambda handle: 400_000,
        nvmlDeviceGetTemperature=lambda handle, sensor: 60,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=1 << 30),
        nvmlDeviceGetPcieThroughput=lambda handle, counter: 1000,
        nvmlDeviceGetFieldValues=lambda handle, fields: [field, field],
        NVML_TEMPERATURE_GPU=0,
        NVML_PCIE_UTIL_TX_BYTES=0,
        NVML_PCIE_UTIL_RX_BYTES=1,
        NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX=138,
        NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX=139,
        NVML_SUCCESS=0,
    )


def window_ratio(folder: Path) -> float:
    """Return the median time of a profiled step of a real run against that of the steps around the window."""
    rows = "".join(f'{{"text": "{"the moon and a star " * random.randint(4, 12)}"}}\n' for _ in range(200))
    (folder / "train.jsonl").write_text(rows)
    (folder / "job.yaml").write_text(JOB)
    job = load_config(folder / "job.yaml", [f"run.folder={folder / 'run'}"])
    with patch.object(distributed, "shut_down", lambda code, **_: code), redirect_stdout(sys.stderr):
        train_from_config(job)
    steps = [event for event in read_events(folder / "run" / "events.jsonl") if event["event"] == "StepTaken"]
    inside = [each["seconds"] for each in steps if 31 <= each["step"] <= 35]
    outside = [each["seconds"] for each in steps if 5 <= each["step"] <= 30 or each["step"] > 36]
    return statistics.median(inside) / statistics.median(outside)


if __name__ == "__main__":
    sys.exit(main())
