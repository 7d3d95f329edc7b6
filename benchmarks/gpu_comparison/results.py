"""From the cases' records to a table, and to the results of topic 8."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from comparison.results import PartResults, Table, threshold_table
from gpu_comparison.cases import Case
from gpu_comparison.kernels import table as profile_table
from gpu_comparison.rates import Records, rates, shares
from gpu_comparison.thresholds import thresholds

FORMULA = (
    "MFU = tokens/s x k N / peak, with k = 6 in full (forward 2, backward 4) and k = 4 with frozen weights (their own "
    "gradient is left out), N = all weights, tied ones once, and `peak` the dense bf16 rate of the datasheet; `+attn` "
    "adds causal attention, 6 x layers x heads x head width x length per token. Recomputation does not count."
)
HEADER = ("case", "tokens/s", "ms/step", "MFU", "+attn", "peak GiB", "forward", "backward", "update", "rest", "waits")


def measured(cases: Sequence[Case], records: Records, *, peak: float | None, is_tiny: bool) -> PartResults:
    """Return the table of all cases and the results."""
    rows = [row(case, records[case.name], peak=peak, is_tiny=is_tiny) for case in cases if case.name in records]
    judged, missing = thresholds(cases, records, peak=peak, is_tiny=is_tiny)
    table = Table(
        "One GPU", HEADER, rows, FORMULA + " Waits: host-device synchronizations per step between log points."
    )
    return PartResults([each.result for each in judged], [table], dict(records), missing)


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


def page(
    heading: str, cases: Sequence[Case], records: Records, *, found: PartResults, peak: float | None, is_tiny: bool
) -> str:
    """Return everything as a section of RESULTS.md: thresholds, cases, and the profile of what was missed."""
    lines = ["## One GPU", "", heading, "", threshold_table(found.results).markdown()]
    lines += [*(f"- not measured: {line}" for line in found.missing), "", *(table.markdown() for table in found.tables)]
    judged, _ = thresholds(cases, records, peak=peak, is_tiny=is_tiny)
    for name in dict.fromkeys(name for each in judged if not each.result.is_met for name in each.cases):
        lines += ["", *_explained(name, records[name])]
    return "\n".join(lines) + "\n"


def _explained(name: str, record: dict[str, Any]) -> list[str]:
    """Return why a case is as fast as it is, as Markdown."""
    memory = ", ".join(f"{what} {value:.1f}" for what, value in record["memory"].items()) or "not measured"
    return [f"### Profile of {name}", "", f"Memory, GiB: {memory}.", "", *profile_table(record["profile"])]
