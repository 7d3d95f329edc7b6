"""Rows are encoded in chunks, in this process or in workers, with the same samples in the same order.

A chunk has its samples concatenated in flat arrays, and counts of what happened to the rows.
"""

import hashlib
import pickle
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from multiprocessing import get_context
from typing import Any

import numpy as np

from finetune.config.sections.data import DataSection
from finetune.data.features import NOTHING_FOUND, Features, Findings, Outcome, Unlabeled
from finetune.data.formats.columns import NOTES
from finetune.data.formats.conversations import OWN_PROMPT
from finetune.data.formats.row_format import ALREADY_READ, UNREAD, RowFormat
from finetune.data.rows import FAULTS_OF_VALUES, RawRow, Row
from finetune.data.token_cache.counts import Counts
from finetune.data.token_cache.integrity import sample_checksums
from finetune.data.token_cache.lengths import LengthLimit, SampleLengthLimit
from finetune.errors import DataError
from finetune.registry.plugins import Plugin, load_again, loaded_plugins
from finetune.registry.table import options_in_use, use_options
from finetune.runtime.processes import exit_with_parent, ignore_run_signals
from finetune.runtime.text.terminal import guard_process

_IMAGES = ("image", "images")
"""Arrays of encoded images: samples with equal tokens but different images are not duplicates."""

Encode = Callable[[Sequence[Row]], Sequence[Outcome]]
"""Encodes rows; returns the outcome of each, in order."""


@dataclass(frozen=True)
class Encoding:
    """How raw rows of a format become samples of a job."""

    encode: Encode
    section: DataSection
    identity: Mapping[str, str]  # the inputs of `encode` and `length`: digests of tokenizer and template, the task
    unknown_ids: frozenset[int] = frozenset()  # tokens for text unknown to the tokenizer
    length: LengthLimit | None = None  # overrides the section's policy for long rows
    over_length: tuple[str, ...] = ("drop",)  # the values of `data.over_length` that make longer rows fit
    format: RowFormat = ALREADY_READ

    @cached_property
    def limit(self) -> LengthLimit:
        """Return the policy for long rows."""
        section = self.section
        return self.length or SampleLengthLimit(section.longest, section.over_length, section.truncate_side)


@dataclass(frozen=True)
class EncodedChunk:
    """The concatenated samples of consecutive rows; a split row has several samples."""

    values: Mapping[str, np.ndarray]  # by feature name
    lengths: Mapping[str, np.ndarray]  # by feature name: int64 [samples]
    num_targets: np.ndarray  # int32 [samples]
    digests: np.ndarray  # uint64 [samples], of the tokens: duplicates have the same digest
    checksums: np.ndarray  # uint64 [samples], of all arrays (`data/token_cache/integrity.py`)
    row_numbers: np.ndarray  # int64 [samples], within the origin
    origins: tuple[tuple[int, str], ...]  # the first sample of each origin, and the origin
    counts: Counts


def encode_chunk(encoding: Encoding, raws: Sequence[RawRow]) -> EncodedChunk:
    """Return the samples of the rows; raises DataError naming the row that cannot be encoded."""
    noted = [encoding.format.read(raw) for raw in raws]
    rows = [{name: row[name] for name in row if name != NOTES} if NOTES in row else row for row in noted]
    outcomes = _outcomes(encoding.encode, rows)
    encoded: list[tuple[int, Features]] = []  # the samples with the indices of their rows
    for row_index, (raw, outcome) in enumerate(zip(raws, outcomes, strict=True)):
        if isinstance(outcome, DataError):
            raise DataError(f"{raw.location}: {outcome}") from outcome
        if outcome is not None and not isinstance(outcome, Unlabeled):
            encoded += [(row_index, sample) for sample in (outcome if isinstance(outcome, tuple) else (outcome,))]
    cut, is_long, lost = _shortened(encoded, encoding.limit)
    trainable = [(row_index, sample) for row_index, sample in cut if sample.num_targets > 0]
    with_sample = {row_index for row_index, _ in trainable}
    unlabeled = {row_index for row_index, outcome in enumerate(outcomes) if isinstance(outcome, Unlabeled)}
    left_out = with_sample | is_long | unlabeled
    without = [row_index for row_index in range(len(raws)) if row_index not in left_out]
    # of a sample, or of its longest sequence, before truncation
    whole_lengths = [sample.longest + sample.cut_tokens for _, sample in encoded]
    longest = max(whole_lengths, default=0)
    found: dict[int, Findings] = {}  # by row, with the findings of all its samples
    for row_index, sample in encoded:
        found[row_index] = found.get(row_index, NOTHING_FOUND).plus(sample.findings)
    first_empty = next((row_index for row_index, findings in found.items() if findings.empty_answers), None)
    flagged: dict[str, Any] = Counter(flag for findings in found.values() for flag in findings.flags)
    notes = dict(Counter(note for row in noted for note in row.get(NOTES, ())))
    counts = Counts(
        rows=len(raws),
        rows_without_target=len(without),
        first_without_target=raws[without[0]].location if without else "",
        empty_rows=sum(_is_blank(rows[row_index]) for row_index in without),
        empty_answers=sum(findings.empty_answers for findings in found.values()),
        first_empty_answer="" if first_empty is None else raws[first_empty].location,
        unread_keys=dict(Counter(key for findings in found.values() for key in findings.unread_keys)),
        **flagged,
        unlabeled_rows=len(unlabeled),
        own_prompt_rows=notes.pop(OWN_PROMPT, 0),
        first_own_prompt=next(
            (raw.location for raw, row in zip(raws, noted, strict=True) if OWN_PROMPT in row.get(NOTES, ())), ""
        ),
        unread_rows=notes.pop(UNREAD, 0),
        lacking_rows=notes,
        longest=longest,
        longest_place=raws[encoded[whole_lengths.index(longest)][0]].location if encoded else "",
    )
    if any(isinstance(outcome, tuple) for outcome in outcomes):
        longest_of: dict[int, int] = {}  # by row, before truncation: the other samples of the row repeat its tokens
        for row_index, sample in encoded:
            longest_of[row_index] = max(sample.length, longest_of.get(row_index, 0))
        repeated = sum(sample.length for _, sample in encoded) - sum(longest_of.values())
        counts = replace(counts, answers=len(encoded), repeated_tokens=repeated)
    return _assemble_chunk(encoding, [(raws[row_index], sample) for row_index, sample in trainable], counts.plus(lost))


def _is_blank(row: Row) -> bool:
    """Return whether no turn of the row has content, or of a row without turns, no column."""
    turns = row.get("messages")
    return not any([turn.get("content") for turn in turns] if isinstance(turns, Sequence) else row.values())


def _outcomes(encode: Encode, rows: Sequence[Row]) -> Sequence[Outcome]:
    """Return the outcome of each row; rows are encoded one by one if encoding them together fails."""
    try:
        return encode(rows)
    except FAULTS_OF_VALUES:
        outcomes: list[Outcome] = []
    for row in rows:
        try:
            outcomes += encode([row])
        except FAULTS_OF_VALUES as error:
            outcomes.append(DataError(f"cannot be encoded: {error}."))
    return outcomes


def _shortened(
    encoded: Sequence[tuple[int, Features]], policy: LengthLimit
) -> tuple[list[tuple[int, Features]], set[int], Counts]:
    """Return the samples within the length limit, the indices of rows that were dropped, and counts of the losses."""
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
        # a row is counted once, not once for each of its answers
        counted: dict[str, Any] = {name: 0 for name, row_indices in affected.items() if row_index in row_indices}
        for name, row_indices in affected.items():
            if getattr(counts, name):
                row_indices.add(row_index)
        lost = lost.plus(replace(counts, **counted))
    return within, affected["long_rows"], lost


def _assemble_chunk(encoding: Encoding, trainable: Sequence[tuple[RawRow, Features]], counts: Counts) -> EncodedChunk:
    samples = [sample for _, sample in trainable]
    names = list(samples[0].arrays) if samples else []
    values = {name: np.concatenate([sample.arrays[name] for sample in samples]) for name in names}
    lengths = {name: np.array([len(sample.arrays[name]) for sample in samples], np.int64) for name in names}
    num_targets = np.array([sample.num_targets for sample in samples], np.int32)
    tokens = values[names[0]] if names else np.zeros(0, np.uint32)
    origins: list[tuple[int, str]] = []
    for index, (raw, _) in enumerate(trainable):
        if not origins or origins[-1][1] != raw.origin:
            origins.append((index, raw.origin))
    sample_counts = Counts(
        samples=len(samples),
        tokens=len(tokens),
        targets=int(num_targets.sum()),
        unknown_tokens=sum(int(np.count_nonzero(tokens == token)) for token in encoding.unknown_ids),
    )
    return EncodedChunk(
        values=values,
        lengths=lengths,
        num_targets=num_targets,
        digests=_digests(values, lengths),
        checksums=sample_checksums(values, lengths, num_samples=len(samples)),
        row_numbers=np.array([raw.number for raw, _ in trainable], np.int64),
        origins=tuple(origins),
        counts=counts.plus(sample_counts),
    )


def _digests(values: Mapping[str, np.ndarray], lengths: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return 64 bits of the BLAKE2b digest of each sample's tokens (its first array) and images."""
    parts: list[list[memoryview]] = []  # of each array, the bytes of each sample
    for number, (name, array) in enumerate(values.items()):
        if number == 0 or name in _IMAGES:
            content, size = memoryview(array.tobytes()), array.itemsize
            bounds = pairwise(accumulate(lengths[name].tolist(), initial=0))
            parts.append([content[start * size : stop * size] for start, stop in bounds])
    digests = (hashlib.blake2b(b"".join(of_sample), digest_size=8).digest() for of_sample in zip(*parts, strict=True))
    return np.frombuffer(b"".join(digests), dtype=np.uint64)


ROWS_PER_CHUNK = 1024
BYTES_PER_CHUNK = 4 << 20
"""The maximum number of rows of a chunk, and of bytes of its rows that are not parsed yet."""

CHUNKS_BEFORE_WORKERS = 16
"""The number of chunks that are encoded in this process before workers are started."""


class WorkersLost(DataError):
    """An encoding worker exited unexpectedly; the chunks written so far are intact."""


class EncoderPool:
    """Encodes rows in this process or in workers that are kept until `close` (`contextlib.closing`).

    Starting workers takes time, so the first chunks are encoded in this process; small sets need no workers.
    """

    def __init__(self, encoding: Encoding, *, num_workers: int) -> None:
        self._encoding = encoding
        self._num_workers = num_workers
        self._chunks_before_workers = CHUNKS_BEFORE_WORKERS if num_workers else sys.maxsize
        self._pool: ProcessPoolExecutor | None = None
        self._starting: list[Future[bool]] = []

    def encode(self, rows: Iterator[RawRow]) -> Iterator[EncodedChunk]:
        """Yield the chunks in the order of the rows, with only a few chunks of rows in memory.

        Raises DataError naming the row that cannot be encoded, or WorkersLost.
        """
        pending: deque[Future[EncodedChunk]] = deque()
        try:
            for raws in cut_into_chunks(rows):
                pool = self._ready_pool()
                if pool is None:
                    yield encode_chunk(self._encoding, raws)
                    continue
                pending.append(pool.submit(_encode_in_worker, raws))
                if len(pending) > 2 * self._num_workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise WorkersLost(
                "a tokenization worker exited unexpectedly, perhaps out of memory. Lower data.prepare_workers."
            ) from error

    def close(self) -> None:
        """Shut down the workers after their current chunks."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _ready_pool(self) -> ProcessPoolExecutor | None:
        """Return the pool once a worker is ready, and start it when enough chunks have been encoded without workers."""
        if self._chunks_before_workers > 0:
            self._chunks_before_workers -= 1
            return None
        if self._pool is None:
            # spawn: a forked child would inherit locks held by threads of torch or of the tokenizer
            self._pool = ProcessPoolExecutor(
                self._num_workers,
                get_context("spawn"),
                initializer=_set_encoding,
                initargs=(loaded_plugins(), pickle.dumps((self._encoding, options_in_use()))),
            )
            self._starting = [self._pool.submit(bool) for _ in range(self._num_workers)]
        return self._pool if self._is_worker_ready() else None

    def _is_worker_ready(self) -> bool:
        return any(worker.done() for worker in self._starting)


def cut_into_chunks(rows: Iterator[RawRow]) -> Iterator[list[RawRow]]:
    """Yield the rows in chunks; a small last one is part of the one before it, since rows may need others of theirs."""
    complete: list[RawRow] = []
    chunk: list[RawRow] = []
    num_bytes = 0
    for row in rows:
        chunk.append(row)
        num_bytes += len(row.content) if isinstance(row.content, bytes) else 0
        if len(chunk) >= ROWS_PER_CHUNK or num_bytes >= BYTES_PER_CHUNK:
            if complete:
                yield complete
            complete, chunk, num_bytes = chunk, [], 0
    if complete and len(chunk) >= ROWS_PER_CHUNK // 8:
        yield complete
        complete = []
    if complete or chunk:
        yield complete + chunk


_encodings: list[Encoding] = []
"""What this worker process was sent once."""


def _set_encoding(plugins: Sequence[Plugin], pickled: bytes) -> None:
    guard_process()
    ignore_run_signals()
    exit_with_parent()
    load_again(plugins)  # the encoding may refer to their code
    encoding, options = pickle.loads(pickled)
    use_options(options)
    _encodings[:] = [encoding]


def _encode_in_worker(raws: Sequence[RawRow]) -> EncodedChunk:
    return encode_chunk(_encodings[0], raws)
