"""Refuse a prepared set: rows that the job does not allow, absent columns, shares beyond the limits of `data.audit`."""

from collections.abc import Iterable
from typing import Any

from finetune.config.sections.data import AuditSection, DataSection
from finetune.data.token_cache.chunks import EncodingPlan
from finetune.data.token_cache.counts import REMEDY, Counts, exceeded_shares, num_duplicates
from finetune.data.token_cache.store import TokenCache
from finetune.errors import DataError


def refuse_counts(
    counts: Counts,
    section: DataSection,
    *,
    key: str,
    plan: EncodingPlan,
    mapped: Iterable[Any] | None = None,
) -> None:
    """Raise DataError with all problems: refused rows and, unless `mapped` is None, no samples, and absent columns."""
    problems = []
    if counts.long_rows and section.over_length == "refuse":
        *others, last = plan.over_length
        instead = f"{', '.join(others)} or {last}" if others else last
        problems.append(
            f"{counts.long_rows:,} of {counts.rows:,} rows are longer than {plan.length.limits} "
            f"(the longest has {counts.longest:,} tokens: {counts.longest_place}). "
            f"Set data.over_length: {instead}, or {plan.length.advice.format(longest=counts.longest)}."
        )
    if counts.rows_without_target and section.no_target == "refuse":
        cut = ", some of them because they were truncated" if counts.truncated_targets else ""
        problems.append(
            f"{counts.rows_without_target:,} of {counts.rows:,} rows have no target{cut} "
            f"(the first: {counts.first_without_target}). Fix them, or set data.no_target: drop."
        )
    problems += [f"no row has the column `{name}` of {key}.columns. Fix it." for name in counts.absent(mapped or ())]
    if mapped is not None and not problems and counts.samples == 0:
        problems.append(f"no samples are left: {'; '.join(counts.lines())}.")
    if problems:
        raise DataError(f"{key}: " + f"\n{key}: ".join(problems))


def refuse_shares(prepared: TokenCache, section: AuditSection, *, key: str) -> None:
    """Raise DataError with every share of this source that exceeds its limit in `data.audit`."""
    duplicates = 0 if section.max_duplicate_samples is None else sum(num_duplicates([prepared.digests]))
    problems = [f"{share} {REMEDY}" for share in exceeded_shares(prepared.counts, duplicates, section)]
    if problems:
        raise DataError("\n".join(f"{key}: {problem}" for problem in problems))
