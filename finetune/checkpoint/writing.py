"""The files that one rank writes of a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor

from finetune.checkpoint.manifest import FileFacts, first_problem
from finetune.checkpoint.record import BUFFER, TensorRecord
from finetune.checkpoint.room import told_plainly
from finetune.checkpoint.sharing import PlannedFile
from finetune.checkpoint.tensor_file import TensorFile
from finetune.errors import CheckpointError
from finetune.runtime.waypoints import reach

_BLOCK_ELEMENTS = 1 << 20


@dataclass
class Written:
    """What has been written, by one rank or by all."""

    files: dict[str, FileFacts] = field(default_factory=dict)  # by path in the checkpoint
    tensors: dict[str, str] = field(default_factory=dict)  # SHA-256 by stored name
    bad: list[str] = field(default_factory=list)  # stored names of what is not finite

    @classmethod
    def of_all(cls, shares: Sequence["Written"]) -> "Written":
        """Return what all ranks have written together."""
        total = cls()
        for share in shares:
            total.files.update(share.files)
            total.tensors.update(share.tensors)
            total.bad.extend(share.bad)
        return total


class Writing:
    """The files of one rank in the making; a failure is kept until the end, as other ranks still wait for this one."""

    def __init__(self, staging: Path, *, step: int) -> None:
        self._staging = staging
        self._step = step
        self._open: dict[str, TensorFile] = {}
        self._written = Written()
        self._failure: Exception | None = None

    def add(self, file: PlannedFile, record: TensorRecord, tensor: Tensor) -> None:
        """Write the next tensor of the file, where nothing has failed so far."""
        if self._failure is not None:
            return
        try:
            with told_plainly(self._staging):
                self._add(file, record, tensor)
        except Exception as error:  # raised by `close`, on every rank
            self._failure = error

    def close(self) -> Written:
        """Bring the files to the disk, read them back and return what they are; raises what has failed."""
        if self._failure is not None:
            for file in self._open.values():
                file.abandon()
            raise self._failure
        with told_plainly(self._staging):
            for name, file in self._open.items():
                self._written.files[name] = file.close()
            self._verify(self._written.files)
        return self._written

    def _add(self, file: PlannedFile, record: TensorRecord, tensor: Tensor) -> None:
        path = self._staging / file.name
        if file.name not in self._open:
            path.parent.mkdir(exist_ok=True)
            self._open[file.name] = TensorFile(path, file.records)
        reach("save.write", step=self._step, path=path)
        self._written.tensors[record.stored_name] = self._open[file.name].add(tensor)
        if record.key != BUFFER and not is_finite(tensor):
            self._written.bad.append(record.stored_name)

    def _verify(self, files: Mapping[str, FileFacts]) -> None:
        for name in files:
            problem = first_problem(self._staging, files, [name])
            if problem is not None:
                raise CheckpointError(f"{self._staging}: {problem}, right after writing it. Suspect the disk.")
            reach("save.written", step=self._step, path=self._staging / name)


def is_finite(tensor: Tensor) -> bool:
    """Tell whether every number is finite; a block at a time, and a sum tells most of what there is to know.

    >>> import torch
    >>> is_finite(torch.tensor([1.0, float("inf")])), is_finite(torch.tensor([3e38, 3e38]))
    (False, True)
    """
    if not tensor.is_floating_point():
        return True
    blocks = torch.split(tensor.reshape(-1), _BLOCK_ELEMENTS)
    return all(isfinite(float(block.sum())) or bool(block.isfinite().all()) for block in blocks)
