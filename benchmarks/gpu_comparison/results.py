"""From the cases' records to a table, and to the results of topic 8."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from comparison.results import PartResults, Result, Spread, Table
from gpu_comparison.cases import Case
from gpu_comparison.shapes import SHAPES, Shape, tiny, weight_flops

TOPIC = 8
FORMULA = (
    "MFU = tokens/s x k N / peak, with k = 6 in full (forward 2, backward 4) and k = 4 with frozen weights (their own "
    "gradient is left out), N = all weights, tied ones once, and `peak` the dense bf16 rate of the datasheet; `+attn` "
    "adds causal attention, 6 x layers x heads x head width x length per token. Recomputation does not count."
)
HEADER = ("case", "tokens/s", "ms/step", "MFU", "+attn", "peak GiB", "forward", "backward", "update", "rest", "waits")

Records = Mapping[str, dict[str, Any]]


def measured(cases: Sequence[Case], records: Records, *, peak: float | None, is_tiny: bool) -> PartResults:
    """Return the table of all cases and the results."""
    rows = [row(case, records[case.name], peak=peak, is_tiny=is_tiny) for case in cases if case.name in records]
    results, missing = thresholds(cases, records, peak=peak, is_tiny=is_tiny)
    table = Table(
        "One GPU", HEADER, rows, FORMULA + " Waits: host-device synchronisations per step between log points."
    )
    return PartResults(results, [table], dict(records), missing)


def row(case: Case, record: dict[str, Any], *, peak: float | None, is_tiny: bool) -> list[str]:
    """Return the case's line."""
    if "error" in record:
        return [case.name, record["error"][:110], *[""] * (len(HEADER) - 2)]
    phases, waits = record["phases"], record["waits_per_step"]
    parts = [f"{1000 * phases[name]:.1f}" if name in phases else "-" for name in ("forward", "backward", "update")]
    plain, whole = (shares(case, record, peak=peak, is_tiny=is_tiny, with_attention=each) for each in (False, True))
    return [
        case.name,
        f"{np.median(rates(record)):,.0f}",
        f"{1000 * np.median(record['step_seconds']):.1f}",
        f"{100 * np.median(plain):.1f}%" if plain else "-",
        f"{100 * np.median(whole):.1f}%" if whole else "-",
        f"{record['peak_bytes'] / 2**30:.1f}",
        *parts,
        f"{1000 * phases.get('data', 0):.1f}" if "forward" in phases else "-",
        "-" if waits is None else f"{waits:g}",
    ]


def rates(record: dict[str, Any]) -> list[float]:
    """Return tokens per second, step by step."""
    return [tokens / seconds for tokens, seconds in zip(record["step_tokens"], record["step_seconds"], strict=True)]


def shares(
    case: Case, record: dict[str, Any], *, peak: float | None, is_tiny: bool, with_attention: bool
) -> list[float]:
    """Return the share of the device's peak, step by step; nothing where the peak is not known."""
    if peak is None:
        return []
    shape: Shape = tiny(SHAPES[case.shape]) if is_tiny else SHAPES[case.shape]
    flops = weight_flops(shape.num_parameters, is_lora=case.lora)
    if with_attention:
        flops += shape.attention_flops(record["mean_length"])
    return [rate * flops / peak for rate in rates(record)]


def thresholds(
    cases: Sequence[Case], records: Records, *, peak: float | None, is_tiny: bool
) -> tuple[list[Result], list[str]]:
    """Return the results, and what could not be measured."""
    by_name = {case.name: case for case in cases}
    parts = (
        _throughput(records),
        _shares_of_peak(by_name, records, peak=peak, is_tiny=is_tiny),
        _ratios(records),
        _waits(by_name, records),
    )
    return [each for results, _ in parts for each in results], [each for _, missing in parts for each in missing]


Found = tuple[list[Result], list[str]]


def _throughput(records: Records) -> Found:
    name = "8B LoRA, ours"
    if error := _error(records, name):
        return [], [f"tokens/s: {name}: {error}"]
    return [
        Result(TOPIC, "8B LoRA at 4k, eager", Spread.of(rates(records[name])), 13_400, "higher", unit="tokens/s")
    ], []


def _shares_of_peak(by_name: Mapping[str, Case], records: Records, *, peak: float | None, is_tiny: bool) -> Found:
    results, missing = [], []
    for what, (names, limit) in MFU_LIMITS.items():
        found = {name: records[name] for name in names if _error(records, name) is None}
        if not found or not peak:
            errors = "; ".join(f"{name}: {_error(records, name)}" for name in names)
            missing.append(f"MFU of {what}: {errors if not found else 'give --peak-tflops'}")
            continue
        best = max(found, key=lambda name: float(np.median(rates(found[name]))))
        share = shares(by_name[best], found[best], peak=peak, is_tiny=is_tiny, with_attention=False)
        results.append(Result(TOPIC, f"{what}: MFU", Spread.of(share), limit, "higher", note=best))
    return results, missing


def _ratios(records: Records) -> Found:
    results, missing = [], []
    for ours, other, limit in RATIOS:
        errors = [f"{name}: {error}" for name in (ours, other) if (error := _error(records, name))]
        if errors:
            missing.append(f"varying lengths: {'; '.join(errors)}")
            continue
        ratio = Spread.of_ratios(rates(records[ours]), rates(records[other]))
        note = records[ours]["lengths"]
        results.append(Result(TOPIC, f"{ours} / {other}: tokens/s", ratio, limit, "higher", note=note))
    return results, missing


def _waits(by_name: Mapping[str, Case], records: Records) -> Found:
    names = [name for name in records if by_name[name].competitor == "ours" and _error(records, name) is None]
    waits = [records[name]["waits_per_step"] for name in names]
    if not waits or None in waits:
        return [], ["waits for the device: none of our cases was profiled on a GPU"]
    return [Result(TOPIC, "waits for the device a step, between log points", Spread.of(waits), 0, "lower")], []


def _error(records: Records, name: str) -> str | None:
    error: str | None = records.get(name, {"error": "not run"}).get("error")
    return error


MFU_LIMITS = {
    "1B full": (("1B full, ours", "1B full bf16 weights, ours", "1B full, ours 4 rows"), 0.45),
    "1B full, compiled": (("1B full, ours compiled", "1B full bf16 weights, ours compiled"), 0.52),
    "3B full": (("3B full, ours", "3B full bf16 weights, ours"), 0.45),
    "3B full, compiled": (("3B full bf16 weights, ours compiled",), 0.52),
}
"""The best of these cases counts: weights in float32 beside bf16 arithmetic, or in bf16 with stochastic rounding."""

RATIOS = (
    ("varying, ours", "varying, Trainer", 2.0),
    ("varying, ours packs", "varying, TRL packing", 1.5),
)
