"""What became of the rows: every row that is cut or left out is counted, and nothing is lost without a word."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Counts:
    """Rows, samples and tokens of a prepared set."""

    rows: int = 0
    samples: int = 0
    tokens: int = 0
    targets: int = 0
    truncated_rows: int = 0
    truncated_tokens: int = 0  # cut off
    truncated_targets: int = 0  # of those
    long_rows: int = 0  # longer than max_length, neither kept nor cut
    rows_without_target: int = 0
    dropped_tokens: int = 0  # of long rows, or of their windows without a target
    dropped_targets: int = 0  # of those
    split_rows: int = 0  # made into several windows
    excluded_rows: int = 0  # left out because they are evaluated on, and not among `rows`
    empty_rows: int = 0  # among those without a target: no token at all
    unknown_tokens: int = 0  # that stand for text unknown to the tokenizer
    control_rows: int = 0  # whose texts hold names of control tokens, encoded as plain text
    turn_mark_rows: int = 0  # whose texts hold what the chat template writes around turns in plain text
    longest: int = 0  # tokens of the longest row, before any cut
    longest_place: str = ""
    first_without_target: str = ""

    def plus(self, other: "Counts") -> "Counts":
        """Return the counts of both; of two equally long rows the first is named."""
        names = [field.name for field in fields(self) if field.type is int]
        sums: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in names}
        longer = other if other.longest > self.longest else self
        return Counts(
            **sums
            | {
                "longest": longer.longest,
                "longest_place": longer.longest_place,
                "first_without_target": self.first_without_target or other.first_without_target,
            }
        )

    @property
    def has_tokens(self) -> bool:
        """Tell whether samples have lengths: where each is one target and nothing else, as an image is, none has."""
        return self.longest > 1

    def lines(self) -> tuple[str, ...]:
        """Return the counts as lines for the user; what did not happen has no line."""
        share = self.targets / self.tokens if self.tokens else 0.0
        dropped = f"{self.dropped_tokens:,} tokens left out"
        said = {
            f"{self.rows:,} rows -> {self.samples:,} samples": True,
            f"{self.tokens:,} tokens, of which {self.targets:,} targets ({share:.1%})": self.has_tokens,
            f"longest row: {self.longest:,} tokens ({self.longest_place})": self.has_tokens,
            f"truncated: {self.truncated_rows:,} rows, {self.truncated_tokens:,} tokens cut off, "
            f"{self.truncated_targets:,} of them targets": self.truncated_rows,
            f"split into windows: {self.split_rows:,} rows, {dropped} in windows without a target": self.split_rows,
            f"dropped as too long: {self.long_rows:,} rows, {dropped}, {self.dropped_targets:,} of them targets": (
                self.long_rows
            ),
            f"dropped without a target: {self.rows_without_target:,} rows": self.rows_without_target,
            f"left out because data.validation has them, too: {self.excluded_rows:,} rows": self.excluded_rows,
            f"empty: {self.empty_rows:,} of these": self.empty_rows,
            f"unknown to the tokenizer: the text of {self.unknown_tokens:,} tokens": self.unknown_tokens,
            f"names of control tokens in the texts of {self.control_rows:,} rows: encoded as plain text "
            "(data.allow_special_tokens: true gives them their meaning)": self.control_rows,
            f"turn marks of the chat template, which are plain text, in the texts of {self.turn_mark_rows:,} rows: "
            "the model cannot tell these from the turns of a conversation": self.turn_mark_rows,
        }
        return tuple(line for line, happened in said.items() if happened)


def total(counts: Iterable[Counts]) -> Counts:
    """Return the sum of the counts."""
    result = Counts()
    for each in counts:
        result = result.plus(each)
    return result
