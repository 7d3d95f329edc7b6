"""Saves a state of parts on several ranks, one scene after another: `torchrun saving_program.py FOLDER`."""

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from finetune.checkpoint.format.manifest import RunFingerprint
from finetune.checkpoint.read.load import find_checkpoint, verify_checkpoint
from finetune.checkpoint.sharding import gather
from finetune.checkpoint.write import saver
from finetune.checkpoint.write.saver import SavedCheckpoint, Saver
from finetune.checkpoint.write.writer import WrittenFiles
from finetune.config.sections.checkpoint import CheckpointSection
from finetune.errors import CheckpointError, NonFiniteError
from finetune.runtime import distributed
from finetune.runtime.progress import Progress
from finetune.runtime.supervision import heartbeat
from finetune.runtime.supervision.heartbeat import VARIABLE
from tests.checkpoint.parted_run import Parted

RESULTS: dict[str, object] = {}


def main(folder: Path) -> None:
    scenes = [*(every_bit_arrives, while_training_speaks, tried_again_on_one_rank, given_up_on_one_rank)]
    scenes += [*(not_finite_on_one_rank, unforeseen_on_one_rank, not_shared, flipped_after_the_fact)]
    for scene in scenes:
        os.environ[VARIABLE] = ""
        RESULTS[scene.__name__] = scene(folder / scene.__name__)
    (folder / f"rank-{distributed.rank()}.json").write_text(json.dumps(RESULTS))
    distributed.barrier()  # nobody ends while another still speaks to it


class Saving:
    """Saves to a folder, and keeps what it saved and warned of."""

    def __init__(self, folder: Path, parted: Parted | None = None, **section: object) -> None:
        self.saved: list[SavedCheckpoint] = []
        self.warnings: list[str] = []
        self.saver = Saver(
            folder,
            section=CheckpointSection(**section),
            access=(parted or Parted(step=1)).access,
            run=RunFingerprint({"model": "parts"}, settings={}, origin={}),
            on_saved=self.saved.append,
            warn=lambda step, message: self.warnings.append(message),
        )

    def save(self, step: int) -> SavedCheckpoint:
        self.saver(Progress(step))
        self.saver.wait_for_writes()
        return self.saved[-1]

    def is_written(self) -> bool:
        self.saver.report_written()
        return bool(self.saved)


def faults(*written: str) -> None:
    os.environ[VARIABLE] = "; ".join(written)
    heartbeat.read_faults.cache_clear()


def every_bit_arrives(folder: Path) -> object:
    """In pieces smaller than the tensors, small ones together; rehearsed, copied and streamed; with copies on ranks."""
    results = {}
    for copies in (False, True):
        for asynchronous in (True, False):
            parted = Parted(step=1, copies=copies)
            path = folder / f"{copies}-{asynchronous}"
            with patch.object(gather, "CHUNK_ELEMENTS", 50), patch.object(gather, "ROUND_BYTES", 900):
                saving = Saving(path, parted, asynchronous=asynchronous)
                saving.saver.rehearse(num_saves=5)
                saved = saving.save(1)
            found = {}
            for file in saved.path.glob("*/*.safetensors"):
                found |= load_file(file)
            same = [
                name for name, value in found.items() if torch.equal(value.reshape(-1), parted.whole[name].reshape(-1))
            ]
            results[path.name] = [len(same), len(parted.whole), verify_checkpoint(saved.path).manifest.state_sha256]
    return results


def while_training_speaks(folder: Path) -> object:
    """One rank is slow to write; meanwhile all add up numbers on the main line."""
    faults("save.write rank=1 do=sleep seconds=1.5")
    saving = Saving(folder)
    saving.saver(Progress(1))
    went_on = not saving.is_written()
    sums = [float(distributed.sum_tensor(torch.tensor(1.0))) for _ in range(50)]
    still = not saving.is_written()
    saving.saver.wait_for_writes()
    (saved,) = saving.saved
    return [went_on, still, sums == [float(distributed.world())] * 50, saved.stall_seconds < 1.5 < saved.seconds]


def tried_again_on_one_rank(folder: Path) -> object:
    faults("save.write step=1 rank=1 do=no_space")
    saving = Saving(folder)
    return [saving.save(1).path.name, saving.warnings]


def given_up_on_one_rank(folder: Path) -> object:
    """Then the next is written as if nothing had been."""
    faults(*["save.write step=2 rank=1 do=no_space"] * 3)
    saving = Saving(folder)
    saving.save(1)
    return [error_of(saving, 2), names(folder), saving.save(3).path.name]


def not_finite_on_one_rank(folder: Path) -> object:
    parted = Parted(step=1)
    saving = Saving(folder, parted)
    if distributed.rank() == 1:
        with torch.no_grad():
            parted.held["table"].tensor[7] = float("nan")
    return [error_of(saving, 1), names(folder)]


def unforeseen_on_one_rank(folder: Path) -> object:
    """A thread dies on one rank where no care has been taken: others hear of it at once, and saving still works."""
    saving = Saving(folder)
    started = time.monotonic()
    with (
        patch.object(WrittenFiles, "merge", side_effect=KeyError("a bug")) if distributed.rank() == 1 else nullcontext()
    ):
        error = error_of(saving, 1)
    is_quick = time.monotonic() - started < 60
    return [error, is_quick, saving.save(2).path.name, names(folder)]


def not_shared(folder: Path) -> object:
    """Every rank has a folder of its own, as on machines that share none."""
    with patch.object(saver, "_VISIBILITY_CHECKS", 1):
        try:
            Saving(folder / f"machine-{distributed.rank()}").saver.rehearse(num_saves=5)
        except CheckpointError as error:
            return str(error)
    return "it was rehearsed"


def flipped_after_the_fact(folder: Path) -> object:
    faults("save.done step=2 rank=1 do=flip")
    saving = Saving(folder)
    for step in (1, 2):
        saving.save(step)
    found = find_checkpoint(folder, resume="auto", log=lambda message: None)
    return [found.step if found else None, names(folder)]


def error_of(saving: Saving, step: int) -> str:
    try:
        saving.save(step)
    except (CheckpointError, NonFiniteError) as error:
        return f"{type(error).__name__}: {error}"
    return "it was saved"


def names(folder: Path) -> list[str]:
    distributed.barrier()  # rank 0 may still be clearing up
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


if __name__ == "__main__":
    torch.set_num_threads(1)
    saver.RETRY_PAUSES_SECONDS = (0.0, 0.0)
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
