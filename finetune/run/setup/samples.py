"""The record of the samples that each step has consumed, a file per rank in the run folder."""

import json
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from finetune.data.batch import Batch
from finetune.errors import FULL
from finetune.runtime import distributed
from finetune.runtime.files import atomic
from finetune.runtime.run_folder import SAMPLES_FOLDER

_MAX_UNWRITTEN_BYTES = 64 << 20


@with_config(ConfigDict(strict=True, extra="forbid"))
class _Line(TypedDict):
    step: int
    microbatches: list[list[int]]


_LINE = TypeAdapter(_Line)


class SampleRecord:
    """Writes the sample ids of each group to this rank's file in `samples/`.

    A line is `{"step": 1, "microbatches": [[7, 2], [5, 0]]}`, steps counted from 1.
    """

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._unwritten = b""
        weakref.finalize(self, file.close)

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


def open_sample_record(run_folder: Path, *, first_step: int) -> SampleRecord:
    """Return the record, without the lines of steps that are taken again: every step is once in each file.

    Each rank repairs its own files, so none has to wait: a damaged line goes, too, and a file that cannot be read is
    put aside, as the record informs and stops no run.
    """
    folder = run_folder / SAMPLES_FOLDER
    for path in folder.glob("rank-*.jsonl"):
        number = path.stem.removeprefix("rank-")
        if not number.isdecimal() or int(number) % distributed.world() != distributed.rank():
            continue
        try:
            kept = [json.dumps(line) + "\n" for line in _lines(path) if line["step"] <= first_step]
        except OSError:
            path.replace(path.with_name(f".bad-{path.name}"))
        else:
            atomic.write_text(path, "".join(kept))
    folder.mkdir(parents=True, exist_ok=True)
    return SampleRecord((folder / f"rank-{distributed.rank():05d}.jsonl").open("ab", buffering=0))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of the record that are some; raises OSError where the file cannot be read."""
    for line in atomic.read_json_lines(path):
        with suppress(ValidationError):
            yield dict(_LINE.validate_python(line))
