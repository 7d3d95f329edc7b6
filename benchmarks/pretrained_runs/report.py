"""What differs by more than it may; and the tables and the picture of docs/proof/pretrained.md."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # the backend is chosen before
from scaling import Rows, table

from pretrained_runs.cases import CASES

Results = Mapping[str, Any]

LOSSES, WEIGHTS, STRATEGIES, TENSOR_PARALLEL, FIGURES = 1e-4, 1e-4, 1e-5, 2e-5, 1e-5
"""Of a step's loss, of the trained weights (both against the other program), and between strategies; relative.

Tensor parallelism adds up in another order in every layer. Figures of evaluation: absolute.
"""

EXPORTS = {"merged, transformers": 0, "GGUF f16, read by transformers": 1, "GGUF f16, llama.cpp": 1}
"""How many answers may differ from the adapter's: none in float32, one in 16 bits; 8 bits are shown and not judged."""

MUST_BE_EQUAL = ("equal ids", "equal targets but for the newline")
"""What must hold for every row of SFT."""

PROGRAMS = ("ours", "theirs")


def differences(results: Results) -> list[str]:
    """Return what differs by more than it may, of the parts that were measured."""
    return [f"{name}: {line}" for name, record in results.items() for line in _of_part(record)]


def _of_part(record: Results) -> Iterator[str]:
    strategies, rows = record.get("differences", {}), record.get("rows", {})
    limits = {name: TENSOR_PARALLEL if "tensor_parallel" in name else STRATEGIES for name in strategies}
    limits |= {"losses": LOSSES, "weights": WEIGHTS}
    merged = record.get("weights", {}).get("merged", 0.0)
    for what, most in {"losses": record.get("loss_difference", 0.0), "weights": merged, **strategies}.items():
        if not most <= limits[what]:  # NaN is too much
            yield f"{what} by {most:.1e}"
    for what, each in record.get("figures", {}).items():
        if not abs(each["ours"] - each["theirs"]) <= FIGURES:
            yield f"{what}: {each['ours']:.6f} and {each['theirs']:.6f}"
    for what in MUST_BE_EQUAL if rows else ():
        if rows[what] != rows["all"]:
            yield f"{what} in {rows[what]} of {rows['all']} rows"
    for export, alike in record.get("exports", {}).items():
        if record["prompts"] - alike > EXPORTS.get(export, record["prompts"]):
            yield f"{export}: {alike} of {record['prompts']} answers are the adapter's"


def write_page(results: Results, page: Path) -> None:
    """Put each table between its marks on the page, and draw the losses next to it."""
    tables = page_tables(results)
    marks = r"<!-- table ([\w-]+) -->\n.*?<!-- end -->"
    text = page.read_text(encoding="utf-8")
    filled = re.sub(marks, lambda at: f"<!-- table {at[1]} -->\n{tables[at[1]]}\n<!-- end -->", text, flags=re.DOTALL)
    page.write_text(filled, encoding="utf-8")
    _draw(results["quickstart"], page.with_suffix(".png"))


def page_tables(results: Results) -> Mapping[str, str]:
    """Return the tables of the page by the names in its marks."""
    cases = [results[case.name] for case in CASES if case.name in results]
    answers, two = results["answers"], results["strategies"]
    within = ("losses within", "weights within", "their change within")
    spent = ("tokens a step", "CPU-seconds a step", "times as fast (quartiles)", "peak MB", "memory")
    strategies = [(_strategy(name, two["killed"]), f"{most:.1e}") for name, most in two["differences"].items()]
    exports = [(name, f"{alike} of {answers['prompts']}") for name, alike in answers["exports"].items()]
    return {
        "rows": table(("case", "rows", *MUST_BE_EQUAL), [_rows_row(each) for each in cases if each["rows"]]),
        "steps": table(
            ("case", "beside", "steps x rows", "loss, first and last", *within), [_steps_row(each) for each in cases]
        ),
        "figures": table(("64 held-out rows", "figure", "finetune", "the other program"), _figures_rows(cases)),
        "costs": table(("case", *spent), [_costs_row(each) for each in cases]),
        "strategies": table(("strategy", "losses within"), strategies),
        "answers": table(("", "before", "after, finetune", "after, TRL"), _answers_rows(answers)),
        "exports": table(("export", "the adapter's own answers, in plain peft"), exports),
        "newline": table(
            ("mean loss of ten rows, before training", ""),
            [(f"{name} the newline", f"{loss:.4f}") for name, loss in answers["loss_with_newline"].items()],
        ),
        "machine": f"Measured on {results['quickstart']['machine']}.",
    }


def _rows_row(each: Results) -> tuple[str, ...]:
    return (each["title"], *(str(each["rows"][name]) for name in ("all", *MUST_BE_EQUAL)))


def _steps_row(each: Results) -> tuple[str, ...]:
    losses, weights = each["losses"]["ours"], each["weights"]
    ends = f"{losses[0]:.4f}, {losses[-1]:.4f}"
    within = (each["loss_difference"], weights["merged"], weights["update"])
    return (
        each["title"],
        each["theirs"],
        f"{len(losses)} x {each['batch']}",
        ends,
        *(f"{most:.0e}" for most in within),
    )


def _figures_rows(cases: Iterable[Results]) -> Rows:
    return [
        (each["title"], name, *(f"{values[program]:.6f}" for program in PROGRAMS))
        for each in cases
        for name, values in each.get("figures", {}).items()
    ]


def _costs_row(each: Results) -> tuple[str, ...]:
    seconds = " / ".join(f"{each['seconds'][name]:.2f}" for name in PROGRAMS)
    ours, theirs = (each["peak_bytes"][name] / 1e6 for name in PROGRAMS)
    peaks = (f"{ours:,.0f} / {theirs:,.0f}", f"{ours / theirs:.2f}")
    return (each["title"], f"{each['tokens']:.0f}", seconds, each["speed"], *peaks)


def _strategy(name: str, killed: Results) -> str:
    if name != killed["strategy"]:
        return name
    then = f"from step {killed['resumed_from'] + 1} on {killed['resumed_under']}"
    return f"{name}, killed after step {killed['taken']}; {then}"


def _answers_rows(part: Results) -> Rows:
    """Return the rows of before, ours and theirs."""
    order, gsm8k = ("before", *PROGRAMS), part["gsm8k"]
    matches = [f"{part['exact_match'][name]:.0%}" for name in order]
    rows = [(f"exact match, {part['prompts']} held-out instructions", *matches)]
    if gsm8k["rows"]:
        rows.append((f"loss, {gsm8k['rows']} held-out rows of gsm8k", *(f"{gsm8k[name]:.4f}" for name in order)))
    return rows


def _draw(record: Results, path: Path) -> None:
    """Draw both programs' losses above, and by how much they differ below."""
    ours, theirs = (np.array(record["losses"][name]) for name in PROGRAMS)
    number = np.arange(1, len(ours) + 1)
    figure, (above, below) = plt.subplots(2, 1, figsize=(8.4, 4.2), sharex=True, layout="constrained")
    above.plot(number, theirs, lw=7, color="#c9ced6", label=record["theirs"])
    above.plot(number, ours, lw=1.8, color="#1b6ca8", label="finetune")
    above.set_ylabel("training loss")
    above.legend(frameon=False)
    below.semilogy(number, np.maximum(np.abs(ours - theirs) / theirs, 1e-9), ".", color="#1b6ca8")
    below.set_ylabel("relative difference")
    below.set_xlabel("step (fp32, one process)")
    figure.savefig(path, dpi=110)
    plt.close(figure)
