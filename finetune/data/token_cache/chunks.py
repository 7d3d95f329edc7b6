"""Rows encoded a chunk at a time: the samples end to end in flat arrays, and what became of every row."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from finetune.config.sections.data import DataSection
from finetune.data.features import Features, Outcome
from finetune.data.formats.row_format import RowFormat
from finetune.data.rows import FAULTS_OF_VALUES, RawRow, Row
from finetune.data.token_cache.counts import Counts
from finetune.data.token_cache.integrity import sample_checksums
from finetune.data.token_cache.lengths import LengthLimit, SampleLengthLimit
from finetune.errors import DataError

_IMAGES = ("image", "images")
"""Arrays of encoded images: samples with equal tokens and other images are not equal."""

Encode = Callable[[Sequence[Row]], Sequence[Outcome]]
"""Encodes rows: the outcome of each, in their order."""


@dataclass(frozen=True)
class EncodingPlan:
    """How raw rows become samples."""

    format: RowFormat
    encode: Encode
    length: LengthLimit
    unknown_ids: frozenset[int] = frozenset()  # tokens that stand for text unknown to the tokenizer


@dataclass(frozen=True)
class Encoding:
    """How a job encodes rows, whichever source they come from."""

    encode: Encode
    section: DataSection
    identity: Mapping[str, str]  # all that `encode` and `length` depend on: digests of tokenizer and template, the task
    unknown_ids: frozenset[int] = frozenset()
    length: LengthLimit | None = None  # overrides the section's policy for long rows

    def plan(self, row_format: RowFormat) -> EncodingPlan:
        """Return the plan for rows of this format."""
        section = self.section
        policy = self.length or SampleLengthLimit(section.longest, section.over_length, section.truncate_side)
        return EncodingPlan(row_format, self.encode, policy, self.unknown_ids)


@dataclass(frozen=True)
class Chunk:
    """The samples of consecutive rows, end to end; a row that is split makes several."""

    values: Mapping[str, np.ndarray]  # by the names of the features
    lengths: Mapping[str, np.ndarray]  # of the same names: int64 [samples]
    num_targets: np.ndarray  # int32 [samples]
    digests: np.ndarray  # uint64 [samples], of the tokens: equal ones are duplicates
    checksums: np.ndarray  # uint64 [samples], of all arrays (`data/token_cache/integrity.py`)
    row_numbers: np.ndarray  # int64 [samples], within the origin
    origins: tuple[tuple[int, str], ...]  # from which sample on the rows come from which origin
    counts: Counts


def encode_chunk(plan: EncodingPlan, raws: Sequence[RawRow]) -> Chunk:
    """Return the samples of the rows; raises DataError naming the row that cannot be encoded."""
    rows = [plan.format.read(raw) for raw in raws]
    outcomes = _outcomes(plan.encode, rows)
    encoded = list(_encoded(raws, outcomes))
    cut, is_long, lost = _shortened(encoded, plan.length)
    trainable = [(row_index, sample) for row_index, sample in cut if sample.num_targets > 0]
    with_sample = {row_index for row_index, _ in trainable}
    without = [row_index for row_index in range(len(raws)) if row_index not in with_sample and row_index not in is_long]
    longest = max(encoded, key=lambda indexed: _whole_length(indexed[1]), default=None)
    seen = Counts(
        rows=len(raws),
        rows_without_target=len(without),
        first_without_target=raws[without[0]].place if without else "",
        empty_rows=sum(_is_empty(rows[row_index]) for row_index in without),
        control_rows=_num_rows(encoded, "has_control_names"),
        turn_mark_rows=_num_rows(encoded, "has_turn_marks"),
        argument_rows=_num_rows(encoded, "has_arguments"),
        override_rows=_num_rows(encoded, "has_overrides"),
        dropped_reasoning_rows=_num_rows(encoded, "has_dropped_reasoning"),
        longest=_whole_length(longest[1]) if longest else 0,
        longest_place=raws[longest[0]].place if longest else "",
    )
    if any(isinstance(outcome, tuple) for outcome in outcomes):
        seen = replace(seen, answers=len(encoded), repeated_tokens=_num_repeated(encoded))
    else:
        lost = replace(lost, long_answers=0)
    return _assembled(plan, [(raws[row_index], sample) for row_index, sample in trainable], seen.plus(lost))


def _num_rows(encoded: Sequence[tuple[int, Features]], flag: str) -> int:
    """Return how many rows have a sample with the flag."""
    return len({row_index for row_index, sample in encoded if getattr(sample, flag)})


def _num_repeated(samples: Sequence[tuple[int, Features]]) -> int:
    """Return the tokens of all samples but the longest of each row, before any cut."""
    longest: dict[int, int] = {}
    for row_index, sample in samples:
        longest[row_index] = max(sample.length, longest.get(row_index, 0))
    return sum(sample.length for _, sample in samples) - sum(longest.values())


def _outcomes(encode: Encode, rows: Sequence[Row]) -> Sequence[Outcome]:
    """Return what becomes of the rows; where that cannot even be tried of all at once, of one after the other."""
    try:
        return encode(rows)
    except FAULTS_OF_VALUES:
        return [_outcome(encode, row) for row in rows]


def _outcome(encode: Encode, row: Row) -> Outcome:
    try:
        (outcome,) = encode([row])
    except FAULTS_OF_VALUES as error:
        return DataError(f"cannot be encoded: {error}.")
    return outcome


def _encoded(raws: Sequence[RawRow], outcomes: Sequence[Outcome]) -> Iterator[tuple[int, Features]]:
    """Yield the samples with the indices of their rows."""
    for row_index, (raw, outcome) in enumerate(zip(raws, outcomes, strict=True)):
        if isinstance(outcome, DataError):
            raise DataError(f"{raw.place}: {outcome}") from outcome
        if isinstance(outcome, tuple):
            yield from ((row_index, sample) for sample in outcome)
        elif outcome is not None:
            yield row_index, outcome


def _shortened(
    encoded: Sequence[tuple[int, Features]], policy: LengthLimit
) -> tuple[list[tuple[int, Features]], set[int], Counts]:
    """Return the samples within the length, the indices of rows left out for theirs, and what is lost."""
    within, lost = [], Counts()
    affected: dict[str, set[int]] = {"long_rows": set(), "split_rows": set(), "truncated_rows": set()}
    for row_index, sample in encoded:
        if sample.cut_tokens:
            cut = Counts(truncated_rows=1, truncated_tokens=sample.cut_tokens, truncated_targets=sample.cut_targets)
            lost = lost.plus(cut)
        if policy.fits(sample):
            within.append((row_index, sample))
            continue
        parts, counts = policy.shorten(sample)
        within += [(row_index, part) for part in parts]
        # a row counts once, not each of its answers
        once: dict[str, Any] = {name: 0 for name, row_indices in affected.items() if row_index in row_indices}
        for name, row_indices in affected.items():
            if getattr(counts, name):
                row_indices.add(row_index)
        lost = lost.plus(replace(counts, long_answers=counts.long_rows, **once))
    return within, affected["long_rows"], lost


def _whole_length(sample: Features) -> int:
    """Return the tokens of the sample, or of its longest sequence, before anything was cut off."""
    return sample.longest + sample.cut_tokens


def _assembled(plan: EncodingPlan, trainable: Sequence[tuple[RawRow, Features]], seen: Counts) -> Chunk:
    samples = [sample for _, sample in trainable]
    names = list(samples[0].arrays) if samples else []
    values = {name: np.concatenate([sample.arrays[name] for sample in samples]) for name in names}
    lengths = {name: np.array([len(sample.arrays[name]) for sample in samples], np.int64) for name in names}
    num_targets = np.array([sample.num_targets for sample in samples], np.int32)
    tokens = values[names[0]] if names else np.zeros(0, np.uint32)
    made = Counts(
        samples=len(samples),
        tokens=len(tokens),
        targets=int(num_targets.sum()),
        unknown_tokens=sum(int(np.count_nonzero(tokens == token)) for token in plan.unknown_ids),
    )
    return Chunk(
        values=values,
        lengths=lengths,
        num_targets=num_targets,
        digests=_digests(values, lengths),
        checksums=sample_checksums(values, lengths, num_samples=len(samples)),
        row_numbers=np.array([raw.number for raw, _ in trainable], np.int64),
        origins=tuple(_beginnings([raw.origin for raw, _ in trainable])),
        counts=seen.plus(made),
    )


def _digests(values: Mapping[str, np.ndarray], lengths: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return for each sample 64 bits of the BLAKE2b digest of its tokens (its first array) and of its images."""
    hashed = [name for number, name in enumerate(values) if number == 0 or name in _IMAGES]
    parts = [_slices(values[name], lengths[name].tolist()) for name in hashed]
    digests = (
        hashlib.blake2b(b"".join(hashed_bytes), digest_size=8).digest() for hashed_bytes in zip(*parts, strict=True)
    )
    return np.frombuffer(b"".join(digests), dtype=np.uint64)


def _slices(array: np.ndarray, lengths: Sequence[int]) -> Iterator[memoryview]:
    """Yield the bytes of each sample."""
    content, size = memoryview(array.tobytes()), array.itemsize
    return (content[a * size : b * size] for a, b in pairwise(accumulate(lengths, initial=0)))


def _beginnings(origins: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield each origin with the index of its first sample."""
    before = None
    for index, origin in enumerate(origins):
        if origin != before:
            yield index, origin
        before = origin


def _is_empty(row: Row) -> bool:
    """Return whether no text is in the row."""
    turns = row.get("messages")
    texts = [turn.get("content") for turn in turns] if isinstance(turns, Sequence) else list(row.values())
    return not any(texts)
