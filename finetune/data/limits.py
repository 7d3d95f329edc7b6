"""What stops a run before it trains: rows that the section refuses, and shares above those that it allows."""

from collections.abc import Iterator

import numpy as np

from finetune.config.sections.data import AuditSection, DataSection
from finetune.data.counts import Counts
from finetune.data.store import PreparedSet
from finetune.errors import DataError


def refuse(counts: Counts, section: DataSection, *, key: str) -> None:
    """Raise DataError with all that must be mended: rows that the section refuses, or no sample left."""
    problems = []
    if counts.long_rows and section.over_length == "refuse":
        problems.append(
            f"{counts.long_rows:,} of {counts.rows:,} rows are longer than data.max_length: {section.max_length} "
            f"(the longest has {counts.longest:,} tokens: {counts.longest_place}). "
            f"Set data.over_length: truncate or drop, or data.max_length: {counts.longest}."
        )
    if counts.rows_without_target and section.no_target == "refuse":
        problems.append(
            f"{counts.rows_without_target:,} of {counts.rows:,} rows have no target to learn from "
            f"(the first: {counts.first_without_target}). Mend them, or set data.no_target: drop."
        )
    if not problems and counts.samples == 0:
        problems.append(f"no sample is left: {'; '.join(counts.lines())}.")
    if problems:
        raise DataError(f"{key}: " + f"\n{key}: ".join(problems))


def refuse_shares(prepared: PreparedSet, section: AuditSection, *, key: str) -> None:
    """Raise DataError with every share of this source that is above what `data.audit` allows."""
    problems = list(_above(prepared, section))
    if problems:
        raise DataError("\n".join(f"{key}: {problem}" for problem in problems))


def num_duplicates(digests: np.ndarray) -> int:
    """Return how many samples equal an earlier one."""
    return len(digests) - len(np.unique(digests))


def _above(prepared: PreparedSet, section: AuditSection) -> Iterator[str]:
    counts = prepared.counts
    cut, left_out = counts.truncated_rows + counts.split_rows, counts.long_rows + counts.rows_without_target
    lost = counts.truncated_targets + counts.dropped_targets
    twice = 0 if section.max_duplicate_samples is None else num_duplicates(prepared.digests)
    shares = (
        ("max_truncated_rows", section.max_truncated_rows, cut, counts.rows, "rows were cut or split"),
        ("max_dropped_rows", section.max_dropped_rows, left_out, counts.rows, "rows were left out"),
        ("max_lost_targets", section.max_lost_targets, lost, counts.targets + lost, "targets were cut off or left out"),
        ("max_duplicate_samples", section.max_duplicate_samples, twice, counts.samples, "samples equal an earlier one"),
        (
            *("max_unknown_tokens", section.max_unknown_tokens, counts.unknown_tokens, counts.tokens),
            "tokens stand for text that the tokenizer does not know",
        ),
    )
    for name, limit, num, among, what in shares:
        if limit is not None and num > limit * among:
            yield (
                f"{num:,} of {among:,} {what} ({num / among:.2%}): data.audit.{name} allows {limit:.2%}. "
                "Mend the rows, choose otherwise in `data`, or allow more."
            )
