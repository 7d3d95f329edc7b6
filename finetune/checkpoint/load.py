"""The state of a checkpoint is written into what training holds, each rank reading only the rows of its own share."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from finetune.checkpoint.find import Found
from finetune.checkpoint.gather import agree_on_records
from finetune.checkpoint.reading import places
from finetune.checkpoint.record import PARAMETER, WHOLE, TensorRecord
from finetune.checkpoint.state import StateAccess
from finetune.checkpoint.tensor_file import read_span, stored
from finetune.checkpoint.together import all_do
from finetune.errors import CheckpointError
from finetune.runtime.cores import usable_cores
from finetune.runtime.waypoints import reach

_LISTED = 8
_MOST_THREADS = 4


Kept = Callable[[Path], np.ndarray | None]
"""Returns all bytes of a file that is in memory already."""


def nothing_kept(path: Path) -> np.ndarray | None:
    """Return None."""
    return None


def read_checkpoint(found: Found, *, access: StateAccess, kept: Kept = nothing_kept) -> dict[str, Any]:
    """Load the verified checkpoint and return its progress; raises CheckpointError listing what differs. Collective."""
    path = found.path
    reach("load.begin", step=found.step)
    saved, scalars = places(found), found.texts.scalars
    all_do(access.begin_writing)  # local: the optimizer makes its state
    wanted = agree_on_records(access)
    fresh = _parameters_without_state([record for _, record in saved.values()])
    _refuse_differences(path, saved, [record for record in wanted if record.key in WHOLE or record.name not in fresh])
    # Nobody starts to hand values on (which is collective) before all have read theirs without an error.
    all_do(lambda: _write_all(saved, scalars, step=found.step, fresh=fresh, access=access, kept=kept))
    access.finish_writing()
    reach("load.done", step=found.step)
    return dict(found.texts.progress)


def _parameters_without_state(records: Sequence[TensorRecord]) -> set[str]:
    """Return the parameters that had not been updated when the checkpoint was taken."""
    updated = {record.name for record in records if record.part == "optimizer"}
    return {record.name for record in records if record.key == PARAMETER} - updated


def _refuse_differences(
    path: Path, saved: Mapping[str, tuple[Path, TensorRecord]], wanted: Sequence[TensorRecord]
) -> None:
    expected = {record.stored_name: record for record in wanted}
    missing = [name for name in expected if name not in saved]
    extra = [name for name in saved if name not in expected]
    reshaped = [
        f"{name} ({list(saved[name][1].shape)} there, {list(record.shape)} here)"
        for name, record in expected.items()
        if name in saved and saved[name][1].shape != record.shape
    ]
    lines = [
        f"  {word}: {_listed(names)}"
        for word, names in (
            ("not in the checkpoint", missing),
            ("only in the checkpoint", extra),
            ("of another shape", reshaped),
        )
        if names
    ]
    if lines:
        raise CheckpointError(
            f"{path} does not hold the state that this run trains\n" + "\n".join(lines) + "\n"
            "Restore model, lora, freeze and optimizer as they were, or write another run.folder to start anew."
        )


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _write_all(
    saved: Mapping[str, tuple[Path, TensorRecord]],
    scalars: Mapping[str, Any],
    *,
    step: int,
    fresh: set[str],
    access: StateAccess,
    kept: Kept,
) -> None:
    access.forget(fresh)
    paths = {path for path, _ in saved.values()}
    held = {path: stored(torch.from_numpy(whole)) for path in paths if (whole := kept(path)) is not None}
    with _files() as open_file:

        def write(place: tuple[Path, TensorRecord]) -> None:
            path, record = place
            reach("load.read", step=step, path=path)
            start, stop = access.span(record)
            whole = held.get(path, {}).get(record.stored_name)
            if whole is not None and access.adopt(record, whole):
                return
            access.write(record, read_span(open_file(path), record, start=start, stop=stop))

        for path in paths:
            open_file(path)
        with ThreadPoolExecutor(_num_threads(access)) as threads:
            deque(threads.map(write, saved.values()), maxlen=0)
    access.write_scalars(scalars["optimizer"])
    access.loss_scale.write(scalars["loss_scale"])


def _num_threads(access: StateAccess) -> int:
    """Return how many threads read: while they copy, the kernel makes memory for the state, page by page."""
    return min(_MOST_THREADS, usable_cores()) if access.device.type == "cpu" else 1


@contextmanager
def _files() -> Iterator[Any]:
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}

        def open_file(path: Path) -> Any:
            if path not in opened:
                opened[path] = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            return opened[path]

        yield open_file
