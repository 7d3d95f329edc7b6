"""What stops a run before it trains: rows that the section refuses, and shares above those that it allows."""

from finetune.config.sections.data import AuditSection, DataSection
from finetune.data.prepared.counts import Counts
from finetune.data.prepared.lengths import Lengths
from finetune.data.prepared.shares import REMEDY, above, num_duplicates
from finetune.data.prepared.store import PreparedSet
from finetune.errors import DataError


def refuse(counts: Counts, section: DataSection, *, key: str, length: Lengths, needs_samples: bool = True) -> None:
    """Raise DataError with all that must be mended: rows that the section refuses, or no sample left."""
    problems = []
    if counts.long_rows and section.over_length == "refuse":
        problems.append(
            f"{counts.long_rows:,} of {counts.rows:,} rows are longer than {length.limits} "
            f"(the longest has {counts.longest:,} tokens: {counts.longest_place}). "
            f"Set data.over_length: truncate or drop, or {length.advice(counts.longest)}."
        )
    if counts.rows_without_target and section.no_target == "refuse":
        cut = ", some of them since they were cut" if counts.truncated_targets else ""
        problems.append(
            f"{counts.rows_without_target:,} of {counts.rows:,} rows have no target to learn from{cut} "
            f"(the first: {counts.first_without_target}). Mend them, or set data.no_target: drop."
        )
    if needs_samples and not problems and counts.samples == 0:
        problems.append(f"no sample is left: {'; '.join(counts.lines())}.")
    if problems:
        raise DataError(f"{key}: " + f"\n{key}: ".join(problems))


def refuse_shares(prepared: PreparedSet, section: AuditSection, *, key: str) -> None:
    """Raise DataError with every share of this source that is above what `data.audit` allows."""
    twice = 0 if section.max_duplicate_samples is None else sum(num_duplicates([prepared.digests]))
    problems = [f"{share} {REMEDY}" for share in above(prepared.counts, twice, section)]
    if problems:
        raise DataError("\n".join(f"{key}: {problem}" for problem in problems))
