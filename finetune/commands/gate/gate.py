"""`finetune evaluate --against`: the release gate. Is a trained model better than its base model or another one?

Both models are measured row by row on the same held-out rows, encoded once, and on general texts and chats. The gate
passes if the whole 95% interval of the gain in loss is above the margin, if no more than the given share of the tokens
of the baseline's own answers to general rows has changed, and if the models see the rows as in their training.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from finetune.commands.evaluate import (
    find_evaluation_target,
    prepare_evaluation,
    report_on_rank_0,
    require_result_file,
)
from finetune.commands.gate.comparison import ComparedModels, Comparison, compare_models
from finetune.commands.printing import print_facts, print_rows
from finetune.config.load import load_config
from finetune.errors import UserError
from finetune.registry.tasks import TASKS
from finetune.runtime import distributed
from finetune.runtime.text.terminal import quiet_libraries

BASE = "base"


@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """The options of the gate."""

    margin: float  # of the loss, in nats per target
    max_forgetting: float  # share of the tokens of the baseline's answers to general rows
    general: Path | None
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
    """Compare, print the result, write the JSON file, and return 0 if the gate passes, else 1.

    Raises UserError for a task whose loss is not a sum over rows. Collective: ranks share the rows, and each of them
    holds a whole model.
    """
    quiet_libraries(is_main=distributed.is_main())
    require_result_file(options.json)
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
    failures = _failures(comparison, options)
    title = f"{tuned.source} against {'its base' if models.is_base else baseline.source}"
    report_on_rank_0(lambda: _report(comparison, failures, options, title=title), json=options.json)
    return distributed.shut_down(int(bool(failures)))


def _report(comparison: Comparison, failures: Sequence[str], options: GateOptions, *, title: str) -> dict[str, Any]:
    """Print the result, and return it with every row."""
    verdict = failures or [f"Better: the loss is lower by more than {options.margin:g}."]
    print(f"{title}: {len(comparison.rows):,} rows")
    print_rows(*_figures(comparison))
    print_facts([("", text) for text in (*_notes(comparison), *verdict)], indent=0)
    name = "not comparable" if comparison.seen_differently else comparison.loss.verdict(options.margin)
    facts = {"title": title, "passes": not failures, "verdict": name, "failures": failures}
    return {**facts, "margin": options.margin, "max_forgetting": options.max_forgetting, **asdict(comparison)}


_NOT_BETTER = {
    "worse": "Worse: the loss is higher by more than {margin:g}.",
    "no difference": "No difference: the losses differ by less than {margin:g}.",
    "undecided": "Undecided: the interval of the gain is not above {margin:g}. More rows make it narrower.",
}


def _failures(comparison: Comparison, options: GateOptions) -> list[str]:
    """Return why the tuned model must not replace the baseline; nothing if it is better."""
    sentences = [f"Not comparable: {text}" for text in comparison.seen_differently]
    verdict, forgetting = comparison.loss.verdict(options.margin), comparison.forgetting
    if verdict != "better":
        sentences.append(_NOT_BETTER[verdict].format(margin=options.margin))
    if forgetting is not None and forgetting.tokens_changed > options.max_forgetting:
        sentences.append(f"Forgets: more than {options.max_forgetting:.0%} of the tokens changed.")
    return sentences


def _notes(comparison: Comparison) -> list[str]:
    """Return sentences about the rows, the base and forgetting."""
    better, worse = (sum(row.gain * sign > 0 for row in comparison.rows) for sign in (1, -1))
    notes = [f"{better:,} rows have a lower loss than before, {worse:,} a higher one."]
    if comparison.may_have_new_head:
        notes.append(
            "The base answers with a new head of random weights, unless `model.name` has such a head: any training "
            "beats that. Compare with another run, too: --against RUN."
        )
    forgetting = comparison.forgetting
    if forgetting is None:
        return [*notes, "Forgetting is not measured: the baseline has random weights, or does not continue texts."]
    left_out = f" {forgetting.num_left_out} general rows are left out." * (forgetting.num_left_out > 0)
    return [
        *notes,
        f"Of the baseline's own answers to general rows, {forgetting.answers_changed:.0%} changed, and "
        f"{forgetting.tokens_changed:.0%} of their tokens.{left_out}",
    ]


def _figures(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return the table of the differences, its head first."""
    forgetting = comparison.forgetting
    measures = {"loss": comparison.loss, comparison.share_name: comparison.share}
    if forgetting is not None:
        measures[f"loss of {forgetting.num_rows} general rows"] = forgetting.loss
    table: list[tuple[str, ...]] = [("", "baseline", "tuned", "gain", "95% interval")]
    for name, measure in measures.items():
        if measure is not None:
            low, high = measure.low, measure.high
            interval = "none: too few rows" if low is None or high is None else f"{low:+.4f} to {high:+.4f}"
            values = f"{measure.baseline:.4f}", f"{measure.tuned:.4f}", f"{measure.gain:+.4f}"
            table.append((name, *values, interval))
    return table
