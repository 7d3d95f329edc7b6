"""Shares of rows, targets, samples and tokens that `data.audit` may limit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from finetune.config.sections.data import AuditSection
from finetune.data.prepared.counts import Counts

UNKNOWN = "stand for text that the tokenizer does not know"
REMEDY = "Mend the rows (`finetune preview` shows them), choose otherwise under `data`, or raise the limit."


@dataclass(frozen=True)
class Share:
    """Some among many, and what `data.audit` allows of them, if it says so."""

    name: str  # the key of `data.audit` is `max_NAME`
    what: str
    num: int
    among: int
    limit: float | None = None

    @property
    def value(self) -> float:
        """Return the share; that of nothing is 0."""
        return self.num / self.among if self.among else 0.0

    def __str__(self) -> str:
        allowed = "" if self.limit is None else f": data.audit.max_{self.name} allows {self.limit:.2%}."
        return f"{self.num:,} of {self.among:,} {self.what} ({self.value:.2%}){allowed}"


def shares(counts: Counts, duplicates: int) -> tuple[Share, ...]:
    """Return the shares that `data.audit` may limit."""
    lost = counts.truncated_targets + counts.dropped_targets
    cut, left_out = counts.truncated_rows + counts.split_rows, counts.long_rows + counts.rows_without_target
    return (
        Share("truncated_rows", "rows were cut or split", cut, counts.rows),
        Share("dropped_rows", "rows were left out", left_out, counts.rows),
        Share("lost_targets", "targets were cut off or left out", lost, counts.targets + lost),
        Share("duplicate_samples", "samples equal an earlier one", duplicates, counts.samples),
        Share("unknown_tokens", f"tokens {UNKNOWN}", counts.unknown_tokens, counts.tokens),
    )


def above(counts: Counts, duplicates: int, section: AuditSection) -> Iterator[Share]:
    """Yield the shares that are above what the section allows, with that limit."""
    limits = {
        "truncated_rows": section.max_truncated_rows,
        "dropped_rows": section.max_dropped_rows,
        "lost_targets": section.max_lost_targets,
        "duplicate_samples": section.max_duplicate_samples,
        "unknown_tokens": section.max_unknown_tokens,
    }
    for share in shares(counts, duplicates):
        limit = limits[share.name]
        if limit is not None and share.value > limit:
            yield replace(share, limit=limit)


def num_duplicates(digests: Sequence[np.ndarray]) -> list[int]:
    """Return for each array how many of its values stand earlier, in it or in an array before it."""
    if not digests:
        return []
    if len(digests) == 1:
        ordered = np.sort(digests[0])  # 19 times faster than to learn where each value stands first
        return [int(np.count_nonzero(ordered[1:] == ordered[:-1]))]
    _, first = np.unique(np.concatenate(digests), return_index=True)
    starts = np.cumsum([0, *map(len, digests)])
    num_new = np.bincount(np.searchsorted(starts, first, side="right") - 1, minlength=len(digests))
    return [len(each) - int(new) for each, new in zip(digests, num_new, strict=True)]
