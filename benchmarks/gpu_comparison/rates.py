"""What a case's record says about its speed."""

from collections.abc import Mapping
from typing import Any

from gpu_comparison.cases import Case
from gpu_comparison.shapes import SHAPES, Shape, tiny, weight_flops

Records = Mapping[str, dict[str, Any]]
"""What the cases have measured, by name; one that failed or was left out has an `error` only."""


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


def error_of(records: Records, name: str) -> str | None:
    """Return why there is no measurement of the case; None where there is one."""
    error: str | None = records.get(name, {"error": "not run"}).get("error")
    return error
