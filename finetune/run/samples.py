"""The samples that a run has consumed: the record in its folder, and the check of a checkpoint's samples."""

import json
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from finetune.data.batch import Batch
from finetune.data.order.order import DatasetView
from finetune.data.token_cache.integrity import digest_of_step_ids, digest_of_steps
from finetune.errors import FULL, CheckpointError
from finetune.runtime import distributed
from finetune.runtime.files import atomic
from finetune.runtime.progress import Progress
from finetune.runtime.run_folder import SAMPLES_FOLDER

_MAX_UNWRITTEN_BYTES = 64 << 20


@with_config(ConfigDict(strict=True, extra="forbid"))
class _Line(TypedDict):
    step: int
    microbatches: list[list[int]]


_LINE = TypeAdapter(_Line)


class SampleRecord:
    """Writes the sample ids of each group to this rank's file in `samples/`.

    A line is `{"step": 1, "microbatches": [[7, 2], [5, 0]]}`, steps counted from 1. A resumed run removes the lines of
    steps that are taken again, so every step is once in each file of the ranks that took it.
    """

    def __init__(self, run_folder: Path, *, first_step: int) -> None:
        folder = run_folder / SAMPLES_FOLDER
        _drop_repeated_steps(folder, after_step=first_step)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = _file(folder, distributed.rank()).open("ab", buffering=0)
        self._unwritten = b""
        weakref.finalize(self, self._file.close)

    def add(self, step: int, group: Sequence[Batch]) -> None:
        """Write the line of the step; on a full disk it is written with a later one, when there is space again."""
        line = json.dumps({"step": step, "microbatches": [batch.counted_ids for batch in group]}) + "\n"
        self._unwritten += line.encode()
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if error.errno not in FULL or len(self._unwritten) > _MAX_UNWRITTEN_BYTES:
                raise


def read_samples(run_folder: Path) -> dict[int, list[list[list[int]]]]:
    """Return the record by step: each rank's microbatches, each of which lists its sample ids."""
    microbatches_by_step: dict[int, list[list[list[int]]]] = {}
    for path in sorted((run_folder / SAMPLES_FOLDER).glob("rank-*.jsonl")):
        for line in _lines(path):
            microbatches_by_step.setdefault(line["step"], []).append(line["microbatches"])
    return microbatches_by_step


def require_same_samples(path: Path, progress: Progress, *, pool: DatasetView, global_batch_size: int) -> None:
    """Raise CheckpointError unless the checkpoint was trained on the samples that the order gives to its steps."""
    if not matches_data_order(progress, pool=pool, global_batch_size=global_batch_size):
        raise CheckpointError(
            f"{path} was trained for {progress.step} steps on other samples than this job's order gives, or on samples "
            "with other content, so the run would resume on other data. Restore data, tokenizer, run.seed, "
            "data.shuffle and train.global_batch_size as they were, or write another run.folder to start a new run."
        )


def matches_data_order(progress: Progress, *, pool: DatasetView, global_batch_size: int) -> bool:
    """Return whether the samples of the progress are those that the order gives to its steps, by id and content.

    A progress of before contents were known is compared by ids, and counts by contents, too, from now on.
    """
    digest = digest_of_steps(pool, progress.step, global_batch_size=global_batch_size)
    if progress.knows_contents:
        return digest == progress.samples_sha256
    ids = digest_of_step_ids(pool.order, progress.step, global_batch_size=global_batch_size)
    if ids != progress.samples_sha256:
        return False
    progress.samples_sha256, progress.knows_contents = digest, True
    return True


def _drop_repeated_steps(folder: Path, *, after_step: int) -> None:
    """Remove from the record the steps that are taken again; each rank repairs its own file, so none has to wait.

    A damaged line goes, too; a file that cannot be read is put aside: the record informs, and stops no run.
    """
    for path in folder.glob("rank-*.jsonl"):
        number = path.stem.removeprefix("rank-")
        if not number.isdecimal() or int(number) % distributed.world() != distributed.rank():
            continue
        try:
            kept = [json.dumps(line) + "\n" for line in _lines(path) if line["step"] <= after_step]
        except OSError:
            path.replace(path.with_name(f".bad-{path.name}"))
        else:
            atomic.write_text(path, "".join(kept))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of the record that are some; raises OSError where the file cannot be read."""
    for line in atomic.read_json_lines(path):
        with suppress(ValidationError):
            yield dict(_LINE.validate_python(line))


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.jsonl"
