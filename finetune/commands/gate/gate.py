"""`finetune evaluate --against`: the release gate. Is a trained model better than its base model or another one?

Both models are measured row by row on the same held-out rows, encoded once, and on general texts and chats. The gate
passes if the whole 95% interval of the gain in loss is above the margin, if no more than the given share of the tokens
of the baseline's own answers to general rows has changed, and if the models see the rows as in their training.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from finetune.commands.evaluate import find_evaluation_target, prepare_evaluation
from finetune.commands.gate.comparison import ComparedModels, Comparison, compare_models
from finetune.commands.gate.differences import PairedDifference
from finetune.commands.printing import number_table, print_facts, print_table
from finetune.config.load import load_config
from finetune.errors import UserError
from finetune.registry.tasks import TASKS
from finetune.report.page.facts import format_time
from finetune.report.page.page import render_page
from finetune.runtime import distributed
from finetune.runtime.files import atomic
from finetune.runtime.text.redact import redact_known_values
from finetune.runtime.text.terminal import quiet_libraries

BASE = "base"
TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """The options of the gate."""

    margin: float  # of the loss, in nats per target
    max_forgetting: float  # share of the tokens of the baseline's answers to general rows
    general: Path | None
    html: Path | None
    json: Path | None


def evaluate_against(
    source: Path,
    *,
    against: str,
    step: int | None,
    config: Path | None,
    overrides: Sequence[str],
    options: GateOptions,
    trust_remote_code: bool = False,
) -> int:
    """Compare, print the result, write the page and the JSON file, and return 0 if the gate passes, else 1.

    Raises UserError for several processes, and for a task whose loss is not a sum over rows.
    """
    if distributed.world() > 1:
        raise UserError("--against: run it in one process, without `accelerate launch`.")
    quiet_libraries(is_main=True)
    job, trusts = None if config is None else load_config(config, overrides), trust_remote_code
    tuned = find_evaluation_target(source, step=step, job=job, overrides=overrides, trust_remote_code=trusts)
    entry = TASKS[tuned.config.task.name]
    if not entry.has_row_losses:
        known = ", ".join(task.name for task in TASKS if task.has_row_losses)
        raise UserError(f"--against: task `{entry.name}` has no loss of a single row. Tasks that have one: {known}.")
    if options.general is not None and entry.head != "causal_lm":
        raise UserError(f"--general: models of task `{entry.name}` do not continue texts. Leave it out.")
    baseline = replace(tuned, saved=None)
    if against != BASE:
        folder, same = Path(against), tuned.loaded
        baseline = find_evaluation_target(folder, step=None, job=same, overrides=(), trust_remote_code=trusts)
    models = ComparedModels(prepare_evaluation(tuned), tuned, baseline, is_base=against == BASE)
    comparison = compare_models(models, general_rows=options.general, trust_remote_code=trusts)
    failures = comparison.failures(margin=options.margin, max_forgetting=options.max_forgetting)
    result = GateResult(str(tuned.source), "its base" if against == BASE else str(baseline.source), failures, options)
    result.print(comparison)
    if options.json is not None:
        atomic.write_json(options.json, redact_known_values(result.as_json(comparison)))
    if options.html is not None:
        result.write_page(comparison, options.html)
        print(f"wrote {options.html}")
    return 1 if failures else 0


@dataclass(frozen=True)
class GateResult:
    """The verdict, and the texts and files that show it."""

    tuned: str
    baseline: str
    failures: Sequence[str]
    options: GateOptions

    def print(self, comparison: Comparison) -> None:
        """Print figures, notes and the verdict."""
        print(f"{self.tuned} against {self.baseline}: {len(comparison.rows):,} rows")
        head, *rows = self.figures(comparison)
        table = number_table(*head)
        table.columns[0].justify = "left"
        for row in rows:
            table.add_row(*row)
        print_table(table)
        print_facts([("", text) for text in (*self.notes(comparison), *self.verdict)], indent=0)

    @property
    def verdict(self) -> list[str]:
        """Return the sentences of the verdict."""
        return list(self.failures) or [f"Better: the loss is lower by more than {self.options.margin:g}."]

    def figures(self, comparison: Comparison) -> list[tuple[str, ...]]:
        """Return the table of the differences, its head first."""
        forgetting = comparison.forgetting
        measures = {"loss": comparison.loss, comparison.share_name: comparison.share}
        if forgetting is not None:
            measures[f"loss of {forgetting.num_rows} general rows"] = forgetting.loss
        head = ("", "baseline", "tuned", "gain", "95% interval")
        return [head, *(_figures(name, measure) for name, measure in measures.items() if measure is not None)]

    def notes(self, comparison: Comparison) -> list[str]:
        """Return sentences about the rows and about forgetting."""
        forgetting = comparison.forgetting
        notes = [
            f"{comparison.num_better:,} rows have a lower loss than before, {comparison.num_worse:,} a higher one."
        ]
        if forgetting is not None:
            notes.append(
                f"Of the baseline's own answers to general rows, {forgetting.answers_changed:.0%} changed, and "
                f"{forgetting.tokens_changed:.0%} of their tokens."
            )
        return [*notes, *comparison.notes]

    def as_json(self, comparison: Comparison) -> dict[str, Any]:
        """Return everything as JSON values."""
        content = asdict(comparison)
        margin, max_forgetting = self.options.margin, self.options.max_forgetting
        return {
            "tuned": self.tuned,
            "baseline": self.baseline,
            "passes": not self.failures,
            "verdict": "not comparable" if comparison.seen_differently else comparison.loss.verdict(margin),
            "failures": list(self.failures),
            "margin": margin,
            "max_forgetting": max_forgetting,
            **content,
        }

    def write_page(self, comparison: Comparison, path: Path) -> None:
        """Write the page, whole or not at all."""
        page = render_page(
            "gate.html.jinja",
            folder=TEMPLATES,
            data={},
            title=f"{self.tuned} against {self.baseline}",
            written=format_time(time.time()),
            passes=not self.failures,
            verdict=self.verdict,
            figures=self.figures(comparison),
            notes=self.notes(comparison),
            comparison=comparison,
        )
        atomic.write_bytes(path, page.encode("utf-8", errors="backslashreplace"))


def _figures(name: str, difference: PairedDifference) -> tuple[str, ...]:
    low, high = difference.low, difference.high
    interval = "too few rows" if low is None or high is None else f"{low:+.4f} to {high:+.4f}"
    return name, f"{difference.baseline:.4f}", f"{difference.tuned:.4f}", f"{difference.gain:+.4f}", interval
