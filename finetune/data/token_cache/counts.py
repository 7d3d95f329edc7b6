"""Counts of rows that were kept, truncated or dropped; `data.audit` limits their shares."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from finetune.config.sections.data import AuditSection
from finetune.data.rows import shortened


@dataclass(frozen=True)
class Counts:
    """Rows, samples and tokens of a prepared set."""

    rows: int = 0
    samples: int = 0
    tokens: int = 0
    targets: int = 0
    truncated_rows: int = 0
    truncated_tokens: int = 0  # cut off
    truncated_targets: int = 0  # of truncated_tokens
    long_rows: int = 0  # longer than max_length and dropped
    rows_without_target: int = 0
    dropped_tokens: int = 0  # of long rows, or of their windows without a target
    dropped_targets: int = 0  # of dropped_tokens
    split_rows: int = 0  # into several windows
    excluded_rows: int = 0  # skipped because they are in the validation set; not in `rows`
    empty_rows: int = 0  # of rows_without_target: no tokens at all
    unknown_tokens: int = 0  # tokens for text unknown to the tokenizer
    control_rows: int = 0  # with names of control tokens in their texts, encoded as plain text
    longest: int = 0  # tokens of the longest row, before truncation
    longest_place: str = ""  # its location
    first_without_target: str = ""  # location of the first row without a target
    answers: int = 0  # of rows whose answers are separate samples
    repeated_tokens: int = 0  # of all samples of a row but the longest
    argument_rows: int = 0  # with their own chat template arguments
    dropped_reasoning_rows: int = 0  # with reasoning in a target turn that the chat template drops
    empty_answers: int = 0  # with nothing but the end of the turn as a target
    first_empty_answer: str = ""  # location of the first row with one
    unread_keys: Mapping[str, int] = field(default_factory=dict)  # rows by the keys of turns that nothing reads
    unlabeled_rows: int = 0  # left out, because their label is null, or -1 and no class
    own_prompt_rows: int = 0  # whose answers begin with a question that is not their prompt
    first_own_prompt: str = ""  # location of the first of these
    same_prompt_rows: int = 0  # whose mismatched answers, which KTO compares with, are of the same prompt
    unread_rows: int = 0  # with a value in a column that changes their meaning and is not read
    lacking_rows: Mapping[str, int] = field(default_factory=dict)  # by mapped optional column that they do not have

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "Counts":
        """Return recorded counts, without those that this version does not count."""
        return cls(**{each.name: values[each.name] for each in fields(cls) if each.name in values})

    def plus(self, other: "Counts") -> "Counts":
        """Return the sum of both; of two equally long rows, the first is the longest."""
        names = [each.name for each in fields(self) if each.type is int]
        sums: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in names}
        unread = Counter(self.unread_keys) + Counter(other.unread_keys)
        longer = other if other.longest > self.longest else self
        return Counts(
            **sums
            | {
                "longest": longer.longest,
                "longest_place": longer.longest_place,
                "first_without_target": self.first_without_target or other.first_without_target,
                "first_empty_answer": self.first_empty_answer or other.first_empty_answer,
                "unread_keys": dict(sorted(unread.items(), key=lambda item: (-item[1], item[0]))[:_MAX_KEYS]),
                "first_own_prompt": self.first_own_prompt or other.first_own_prompt,
                "lacking_rows": dict(Counter(self.lacking_rows) + Counter(other.lacking_rows)),
            }
        )

    def absent(self, columns: Iterable[Sequence[str]]) -> list[str]:
        """Return the mapped columns that no row has."""
        return [name for names in columns for name in names if self.lacking_rows.get(name) == self.rows]

    @property
    def has_tokens(self) -> bool:
        """Return whether samples consist of tokens; an image, for example, has length 1."""
        return self.longest > 1

    def lines(self) -> tuple[str, ...]:
        """Return the counts as lines for the user; zero counts have no line."""
        share = self.targets / self.tokens if self.tokens else 0.0
        dropped = f"{self.dropped_tokens:,} tokens dropped"
        unread = [f"`{shortened(key)}` in {num:,} rows" for key, num in self.unread_keys.items()]
        lines = {
            f"{self.rows:,} rows -> {self.samples:,} samples": True,
            f"{self.tokens:,} tokens, of which {self.targets:,} targets ({share:.1%})": self.has_tokens,
            f"each answer is a sample: {self.answers:,} answers; {self.repeated_tokens:,} tokens are repeated from "
            "other samples of the same row": self.answers,
            f"longest row: {self.longest:,} tokens ({self.longest_place})": self.has_tokens,
            f"truncated: {self.truncated_rows:,} rows, {self.truncated_tokens:,} tokens cut off, "
            f"{self.truncated_targets:,} of them targets": self.truncated_rows,
            f"split into windows: {self.split_rows:,} rows, {dropped} in windows without a target": self.split_rows,
            f"dropped as too long: {self.long_rows:,} rows, {dropped}, "
            f"{self.dropped_targets:,} of them targets": self.long_rows,
            f"dropped without a target: {self.rows_without_target:,} rows": self.rows_without_target,
            f"left out without a label: {self.unlabeled_rows:,} rows": self.unlabeled_rows,
            **{f"without the column `{name}`: {num:,} rows": True for name, num in self.lacking_rows.items()},
            f"excluded because they are also in data.validation: {self.excluded_rows:,} rows": self.excluded_rows,
            f"empty: {self.empty_rows:,} of these": self.empty_rows,
            f"unknown to the tokenizer: the text of {self.unknown_tokens:,} tokens": self.unknown_tokens,
            f"names of control tokens in the texts of {self.control_rows:,} rows: encoded as plain text "
            "(data.allow_special_tokens: true encodes them as control tokens)": self.control_rows,
            f"warning: {self.unread_rows:,} rows have a value in a column that changes what they mean and is not read "
            "(`finetune preview FILE` prints the lines that read it)": self.unread_rows,
            f"chat template arguments in {self.argument_rows:,} rows (`chat_template_kwargs`)": self.argument_rows,
            f"warning: the chat template drops the reasoning of answers in {self.dropped_reasoning_rows:,} rows: "
            "the model will not be trained on it": self.dropped_reasoning_rows,
            f"warning: answers of which only the end of the turn is a target: {self.empty_answers:,}, the first in "
            f"{self.first_empty_answer}: the model is trained to answer nothing": self.empty_answers,
            f"unread keys of turns: {', '.join(unread)}": unread,
            f"warning: the answers of {self.own_prompt_rows:,} rows begin with a question of their own, which is not "
            f"exactly `prompt` (the first: {self.first_own_prompt}): the model sees both": self.own_prompt_rows,
            f"warning: the mismatched answers of {self.same_prompt_rows:,} rows are of the same prompt, since all rows "
            "near them have it: KTO's reference point will be too low": self.same_prompt_rows,
        }
        return tuple(line for line, happened in lines.items() if happened)


LOCATIONS = ("longest_place", "first_without_target", "first_empty_answer")
"""The counts that are the location of a row."""

_MAX_KEYS = 100
"""The number of unread keys that are counted: rows may have any number of them."""


def total_counts(counts: Iterable[Counts]) -> Counts:
    """Return the sum of the counts."""
    result = Counts()
    for other in counts:
        result = result.plus(other)
    return result


UNKNOWN = "represent text unknown to the tokenizer"
REMEDY = "Fix the rows (`finetune preview` shows them), change the settings under `data`, or raise the limit."


@dataclass(frozen=True)
class Share:
    """A share of rows, samples or tokens, and its limit in `data.audit` if it is exceeded."""

    name: str  # the key in `data.audit` is `max_NAME`
    what: str
    num: int
    among: int
    limit: float | None = None

    @property
    def value(self) -> float:
        """Return the share, 0 if the total is 0."""
        return self.num / self.among if self.among else 0.0

    def __str__(self) -> str:
        allowed = "" if self.limit is None else f": data.audit.max_{self.name} allows {self.limit:.2%}."
        return f"{self.num:,} of {self.among:,} {self.what} ({self.value:.2%}){allowed}"


def shares(counts: Counts, duplicates: int) -> tuple[Share, ...]:
    """Return the shares that `data.audit` can limit."""
    lost = counts.truncated_targets + counts.dropped_targets
    cut = counts.truncated_rows + counts.split_rows
    dropped = counts.long_rows + counts.rows_without_target + counts.unlabeled_rows
    return (
        Share("truncated_rows", "rows were cut or split", cut, counts.rows),
        Share("dropped_rows", "rows were dropped", dropped, counts.rows),
        Share("lost_targets", "targets were cut off or dropped", lost, counts.targets + lost),
        Share("duplicate_samples", "samples are duplicates", duplicates, counts.samples),
        Share("unknown_tokens", f"tokens {UNKNOWN}", counts.unknown_tokens, counts.tokens),
        Share("unread_rows", "rows have a column that changes their meaning", counts.unread_rows, counts.rows),
    )


def exceeded_shares(counts: Counts, duplicates: int, section: AuditSection) -> Iterator[Share]:
    """Yield the shares that exceed their limit in the section, with that limit."""
    for share in shares(counts, duplicates):
        limit: float | None = getattr(section, f"max_{share.name}")
        if limit is not None and share.value > limit:
            yield replace(share, limit=limit)


def num_duplicates(digests: Sequence[np.ndarray]) -> list[int]:
    """Return, for each array, the number of its values that occur earlier in it or in a previous array."""
    if not digests:
        return []
    if len(digests) == 1:
        ordered = np.sort(digests[0])  # 19 times faster than finding first occurrences with np.unique
        return [int(np.count_nonzero(ordered[1:] == ordered[:-1]))]
    _, first = np.unique(np.concatenate(digests), return_index=True)
    starts = np.cumsum([0, *map(len, digests)])
    num_new = np.bincount(np.searchsorted(starts, first, side="right") - 1, minlength=len(digests))
    return [len(array) - int(new) for array, new in zip(digests, num_new, strict=True)]
