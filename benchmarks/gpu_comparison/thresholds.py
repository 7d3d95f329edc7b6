"""The thresholds for one GPU, and the cases that each is judged by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from comparison.results import Result, Spread
from gpu_comparison.cases import Case
from gpu_comparison.rates import Records, error_of, rates, shares

TOPIC = 8

MFU_LIMITS = {
    "1B full": (("1B full, ours", "1B full bf16 weights, ours"), 0.45),
    "1B full, compiled": (("1B full, ours compiled", "1B full bf16 weights, ours compiled"), 0.52),
    "3B full": (("3B full, ours", "3B full bf16 weights, ours"), 0.45),
    "3B full, compiled": (("3B full, ours compiled", "3B full bf16 weights, ours compiled"), 0.52),
}
"""The best of these cases counts: weights in float32 beside bf16 arithmetic, or in bf16 with stochastic rounding."""

RATIOS = (
    ("varying, ours", "varying, Trainer", 2.0),
    ("varying, ours packs", "varying, TRL packing", 1.5),
    ("1B full, ours under fsdp2", "1B full, ours", 0.95),
    ("1B full, ours under zero2", "1B full, ours", 0.95),
    ("1B full, ours under zero3", "1B full, ours", 0.95),
)
"""Tokens per second, the first to the second: at least so many times."""

LORA_LIMITS = {
    "8B LoRA at 4k": (("8B LoRA, ours", "8B LoRA, ours compiled"), 13_400),
    "7B LoRA at 4k": (("7B LoRA, ours", "7B LoRA, ours compiled"), 14_900),
}
"""Tokens per second on an H100, of the best of these cases. NeMo AutoModel publishes 12,473 for Llama-3-8B and 14,110
for Qwen2.5-7B (https://docs.nvidia.com/nemo/automodel, Performance Summary, LoRA on one GPU, rows of 4,096)."""

SHORT_LORA_CASE = "3B LoRA, ours"
SHORT_LORA_RATE, SHORT_LORA_GIB = 1.5 * 7_245, 0.6 * 20.76
"""Tokens per second on an L40S, and GiB on any GPU. peft publishes 7,245 and 20.76 for Llama-3.2-3B, rank 32, four rows
a batch (huggingface/peft, method_comparison/MetaMathQA)."""
SHORT_LORA_PEAK = 362e12
"""Of the L40S; on another GPU the rate grows with its peak."""
SYNC_FREE = ("", "fsdp2")
"""Strategies under which the host never waits for the device; DeepSpeed reads its gradient norm each step."""


@dataclass(frozen=True)
class Judged:
    """A value beside its threshold, and the cases whose profile says why it is so."""

    result: Result
    cases: tuple[str, ...]


Found = tuple[list[Judged], list[str]]


def thresholds(cases: Sequence[Case], records: Records, *, peak: float | None, is_tiny: bool) -> Found:
    """Return the values, and what could not be measured of what these cases are for."""
    by_name = {case.name: case for case in cases}
    parts = (
        _throughput(by_name, records),
        _short_lora(by_name, records, peak=peak),
        _shares_of_peak(by_name, records, peak=peak, is_tiny=is_tiny),
        _ratios(by_name, records),
        _waits(by_name, records),
    )
    return [each for judged, _ in parts for each in judged], [each for _, missing in parts for each in missing]


def _throughput(by_name: Mapping[str, Case], records: Records) -> Found:
    judged, missing = [], []
    for what, (names, limit) in LORA_LIMITS.items():
        wanted = [name for name in names if name in by_name]
        found = [name for name in wanted if error_of(records, name) is None]
        if found:
            best = max(found, key=lambda name: float(np.median(rates(records[name]))))
            speed = Spread.of(rates(records[best]))
            judged.append(Judged(Result(TOPIC, what, speed, limit, "higher", unit="tokens/s", note=best), (best,)))
        elif wanted:
            missing.append(f"tokens/s of {what}: {_errors(records, wanted)}")
    return judged, missing


def _short_lora(by_name: Mapping[str, Case], records: Records, *, peak: float | None) -> Found:
    name = SHORT_LORA_CASE
    if name not in by_name:
        return [], []
    if (error := error_of(records, name)) is not None:
        return [], [f"speed and memory of {name}: {error}"]
    gib = Spread.of([records[name]["peak_bytes"] / 2**30])
    results = [Result(TOPIC, "3B LoRA up to 768: memory", gib, SHORT_LORA_GIB, "lower", unit="GiB", note=name)]
    if peak:
        limit = SHORT_LORA_RATE * peak / SHORT_LORA_PEAK
        speed = Spread.of(rates(records[name]))
        results.append(Result(TOPIC, "3B LoRA up to 768", speed, limit, "higher", unit="tokens/s", note=name))
    return [Judged(result, (name,)) for result in results], []


def _shares_of_peak(by_name: Mapping[str, Case], records: Records, *, peak: float | None, is_tiny: bool) -> Found:
    judged, missing = [], []
    for what, (names, limit) in MFU_LIMITS.items():
        wanted = [name for name in names if name in by_name]
        found = {name: records[name] for name in wanted if error_of(records, name) is None}
        if not wanted:
            continue
        if not found or not peak:
            errors = "; ".join(f"{name}: {error_of(records, name)}" for name in wanted)
            missing.append(f"MFU of {what}: {errors if not found else 'give --peak-tflops'}")
            continue
        best = max(found, key=lambda name: float(np.median(rates(found[name]))))
        share = shares(by_name[best], found[best], peak=peak, is_tiny=is_tiny, with_attention=False)
        result = Result(TOPIC, f"{what}: MFU", Spread.of(share), limit, "higher", note=best)
        judged.append(Judged(result, (best,)))
    return judged, missing


def _ratios(by_name: Mapping[str, Case], records: Records) -> Found:
    judged, missing = [], []
    for ours, other, limit in RATIOS:
        if ours not in by_name or other not in by_name:
            continue
        if errors := _errors(records, (ours, other)):
            missing.append(f"{ours} / {other}: {errors}")
            continue
        ratio = Spread.of_ratios(rates(records[ours]), rates(records[other]))
        note = records[ours]["lengths"]
        result = Result(TOPIC, f"{ours} / {other}: tokens/s", ratio, limit, "higher", note=note)
        judged.append(Judged(result, (ours, other)))
    return judged, missing


def _waits(by_name: Mapping[str, Case], records: Records) -> Found:
    """Return the waits of all our cases; the case with the most of them is named."""
    names = [
        name
        for name, case in by_name.items()
        if case.competitor == "ours" and case.strategy in SYNC_FREE and not error_of(records, name)
    ]
    waits = {name: records[name]["waits_per_step"] for name in names}
    if not waits:
        return [], []
    if None in waits.values():
        return [], ["waits for the device: none of our cases was profiled on a GPU"]
    worst = max(waits, key=lambda name: waits[name])
    what = "waits for the device a step, between log points"
    result = Result(TOPIC, what, Spread.of(list(waits.values())), 0, "lower", note=f"the most: {worst}")
    return [Judged(result, (worst,))], []


def _errors(records: Records, names: Sequence[str]) -> str:
    return "; ".join(f"{name}: {error}" for name in names if (error := error_of(records, name)))
