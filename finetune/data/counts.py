"""What became of the rows: every row that is cut or left out is counted, and nothing is lost without a word."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

from finetune.config.sections.data import DataSection
from finetune.errors import DataError


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
    dropped_tokens: int = 0  # of long rows
    dropped_targets: int = 0  # of those
    split_rows: int = 0  # made into several windows
    empty_rows: int = 0  # among those without a target: no token at all
    unknown_tokens: int = 0  # that stand for text unknown to the tokenizer
    longest: int = 0  # tokens of the longest row, before any cut
    longest_place: str = ""
    first_without_target: str = ""

    def plus(self, other: "Counts") -> "Counts":
        """Return the counts of both; of two equally long rows the first is named."""
        mine, theirs = asdict(self), asdict(other)
        sums = {field.name: mine[field.name] + theirs[field.name] for field in fields(self) if field.type is int}
        longer = other if other.longest > self.longest else self
        return Counts(
            **sums
            | {
                "longest": longer.longest,
                "longest_place": longer.longest_place,
                "first_without_target": self.first_without_target or other.first_without_target,
            }
        )

    def lines(self) -> tuple[str, ...]:
        """Return the counts as lines for the user; what did not happen has no line."""
        share = self.targets / self.tokens if self.tokens else 0.0
        cut = f"{self.truncated_tokens:,} tokens cut off, {self.truncated_targets:,} of them targets"
        said = {
            f"{self.rows:,} rows -> {self.samples:,} samples": True,
            f"{self.tokens:,} tokens, of which {self.targets:,} targets ({share:.1%})": True,
            f"longest row: {self.longest:,} tokens ({self.longest_place})": True,
            f"truncated: {self.truncated_rows:,} rows, {cut}": self.truncated_rows,
            f"dropped as too long: {self.long_rows:,} rows": self.long_rows,
            f"dropped without a target: {self.rows_without_target:,} rows": self.rows_without_target,
        }
        return tuple(line for line, happened in said.items() if happened)


def total(counts: Iterable[Counts]) -> Counts:
    """Return the sum of the counts."""
    result = Counts()
    for each in counts:
        result = result.plus(each)
    return result


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
