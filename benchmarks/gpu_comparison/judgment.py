"""From the records of the cases to the thresholds, the table of all cases, and the page."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from comparison.results import PartResults, Result, Spread, Table, threshold_table
from gpu_comparison.cases import CASES
from gpu_comparison.kernels import table as profile_table

TOPIC = 5
Records = Mapping[str, dict[str, Any]]
"""What the cases have measured, by name; one that failed or was left out has an `error` only."""

L40S_FLOPS = 362e12
"""The dense bf16 peak of the GPU of peft's comparison; speed on another one is scaled by its peak."""


def rates(record: dict[str, Any]) -> list[float]:
    """Return tokens per second, step by step."""
    return [tokens / seconds for tokens, seconds in zip(record["step_tokens"], record["step_seconds"], strict=True)]


def shares(record: dict[str, Any], *, peak: float, with_attention: bool = False) -> list[float]:
    """Return the share of the device's peak, step by step."""
    flops = record["weight_flops"] + (record["attention_flops"] if with_attention else 0.0)
    return [rate * flops / peak for rate in rates(record)]


@dataclass(frozen=True)
class Measure:
    """A quantity of a record; None if it was not measured there."""

    unit: str
    better: str
    values: Callable[[dict[str, Any], float | None], list[float] | None]


SPEED = Measure("tokens/s", "higher", lambda record, peak: rates(record))
SPEED_ON_L40S = Measure(
    "tokens/s", "higher", lambda record, peak: [rate * L40S_FLOPS / peak for rate in rates(record)] if peak else None
)
MFU = Measure("", "higher", lambda record, peak: shares(record, peak=peak) if peak else None)
MEMORY = Measure("GiB", "lower", lambda record, peak: [record["peak_bytes"] / 2**30])
WAITS = Measure(
    "", "lower", lambda record, peak: None if record["waits_per_step"] is None else [record["waits_per_step"]]
)


@dataclass(frozen=True)
class Threshold:
    """A limit of a measure for the highest of these cases, or for the ratio of the first to `divisor`."""

    what: str
    measure: Measure
    limit: float
    cases: tuple[str, ...]
    divisor: str = ""


def _ratio(ours: str, other: str, limit: float) -> Threshold:
    return Threshold(f"{ours} / {other}: tokens/s", SPEED, limit, (ours,), other)


_SYNC_FREE = tuple(
    case.name
    for case in CASES
    if case.variant.competitor == "ours" and case.variant.strategy in ("", "fsdp2")  # DeepSpeed reads its norm
)

THRESHOLDS = (
    # On an H100. NeMo AutoModel publishes 12,473 for Llama-3-8B and 14,110 for Qwen2.5-7B
    # (https://docs.nvidia.com/nemo/automodel, Performance Summary, LoRA on one GPU, rows of 4,096).
    Threshold("8B LoRA at 4k", SPEED, 13_400, ("8B LoRA, ours", "8B LoRA, ours compiled")),
    Threshold("7B LoRA at 4k", SPEED, 14_900, ("7B LoRA, ours",)),
    Threshold("8B LoRA at 4k in fp8", SPEED, 16_000, ("8B LoRA, ours fp8",)),
    # peft publishes 7,245 tokens/s and 20.76 GiB for Llama-3.2-3B, rank 32, four rows a batch, on an L40S
    # (huggingface/peft, method_comparison/MetaMathQA).
    Threshold("3B LoRA up to 768: memory", MEMORY, 0.6 * 20.76, ("3B LoRA, ours",)),
    Threshold("3B LoRA up to 768, scaled to an L40S", SPEED_ON_L40S, 1.5 * 7_245, ("3B LoRA, ours",)),
    Threshold("1B full: MFU", MFU, 0.45, ("1B full, ours", "1B full bf16 weights, ours")),
    Threshold("1B full, compiled: MFU", MFU, 0.52, ("1B full, ours compiled",)),
    Threshold("3B full: MFU", MFU, 0.45, ("3B full, ours", "3B full bf16 weights, ours")),
    Threshold("3B full, compiled: MFU", MFU, 0.52, ("3B full, ours compiled",)),
    _ratio("varying, ours", "varying, Trainer", 2.0),
    _ratio("varying, ours packs", "varying, TRL packing", 1.5),
    _ratio("1B full, ours under fsdp2", "1B full, ours", 0.95),
    _ratio("1B full, ours under zero2", "1B full, ours", 0.95),
    _ratio("1B full, ours under zero3", "1B full, ours", 0.95),
    Threshold("waits for the device a step, between log points", WAITS, 0, _SYNC_FREE),
)


def error_of(records: Records, name: str) -> str | None:
    """Return why there is no measurement of the case; None where there is one."""
    error: str | None = records.get(name, {"error": "not run"}).get("error")
    return error


def judged(names: Collection[str], records: Records, *, peak: float | None) -> PartResults:
    """Return the thresholds that these cases are for, and the table of all cases."""
    results, missing = [], []
    for threshold in THRESHOLDS:
        cases = [name for name in threshold.cases if name in names]
        if not cases or (threshold.divisor and threshold.divisor not in names):
            continue
        found = _result(threshold, cases, records, peak)
        (results.append if isinstance(found, Result) else missing.append)(found)  # type: ignore[arg-type]
    rows = [_row(name, records[name], peak) for name in names if name in records]
    return PartResults(results, [Table("One GPU", _HEADER, rows, _FORMULA)], dict(records), missing)


def _result(threshold: Threshold, names: list[str], records: Records, peak: float | None) -> Result | str:
    """Return the result, noted with the case that counts, or why there is none."""
    needed = [*names, threshold.divisor] if threshold.divisor else names
    errors = "; ".join(f"{name}: {error}" for name in needed if (error := error_of(records, name)))
    measured = {name: records[name] for name in names if not error_of(records, name)}
    if not measured or (threshold.divisor and errors):
        return f"{threshold.what}: {errors}"
    measure = threshold.measure
    values = {name: found for name, record in measured.items() if (found := measure.values(record, peak)) is not None}
    if not values:
        return f"{threshold.what}: needs a GPU, and its peak (--peak-tflops)"
    highest = max(values, key=lambda name: float(np.median(values[name])))
    spread = Spread.of(values[highest])
    if threshold.divisor:
        spread = Spread.of_ratios(values[highest], rates(records[threshold.divisor]))
    unit = "" if threshold.divisor else measure.unit
    return Result(TOPIC, threshold.what, spread, threshold.limit, measure.better, unit=unit, note=highest)  # type: ignore[arg-type]


_FORMULA = (
    "MFU = tokens/s x k N / peak, with k = 6 in full (forward 2, backward 4) and k = 4 with frozen weights (their own "
    "gradient is left out), N = all weights, tied ones once, and `peak` the dense bf16 rate of the datasheet; `+attn` "
    "adds causal attention, 6 x layers x heads x head width x length per token. Recomputation does not count. Waits: "
    "host-device synchronizations per step between log points."
)
_HEADER = ("case", "tokens/s", "ms/step", "MFU", "+attn", "peak GiB", "forward", "backward", "update", "rest", "waits")


def _row(name: str, record: dict[str, Any], peak: float | None) -> list[str]:
    """Return the case's line of the table."""
    if "error" in record:
        return [name, record["error"][:110], *[""] * (len(_HEADER) - 2)]
    phases, waits = record["phases"], record["waits_per_step"]
    share, whole = (
        f"{100 * np.median(shares(record, peak=peak, with_attention=with_attention)):.1f}%" if peak else "-"
        for with_attention in (False, True)
    )
    return [
        name,
        f"{np.median(rates(record)):,.0f}",
        f"{1000 * np.median(record['step_seconds']):.1f}",
        *(share, whole, f"{record['peak_bytes'] / 2**30:.1f}"),
        *(f"{1000 * phases[phase]:.1f}" if phase in phases else "-" for phase in ("forward", "backward", "update")),
        f"{1000 * phases.get('data', 0):.1f}" if "forward" in phases else "-",
        "-" if waits is None else f"{waits:g}",
    ]


def page(heading: str, found: PartResults) -> str:
    """Return a section of RESULTS.md: thresholds, cases, and the profile of what was missed."""
    lines = ["## One GPU", "", heading, "", threshold_table(found.results).markdown()]
    lines += [*(f"- not measured: {line}" for line in found.missing), "", *(table.markdown() for table in found.tables)]
    for name in dict.fromkeys(result.note for result in found.results if not result.is_met):
        record = found.record[name]
        memory = ", ".join(f"{what} {value:.1f}" for what, value in record["memory"].items()) or "not measured"
        lines += ["", f"### Profile of {name}", "", f"Memory, GiB: {memory}. Documents: {record['lengths']}.", ""]
        lines += profile_table(record["profile"])
    return "\n".join(lines) + "\n"
