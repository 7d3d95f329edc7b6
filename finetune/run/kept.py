"""What a run keeps in its folder of how rows become inputs, so that a checkpoint is exported without its data."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from finetune.config.run_config import RunConfig
from finetune.config.sections.data import DataSection
from finetune.errors import UserError
from finetune.export.folder import replaced
from finetune.model.processing import Processing, load_kept_processing
from finetune.run.layout import settled
from finetune.runtime.json_files import parse_as, read_regular
from finetune.runtime.sealed import SEAL, folder_damage, seal_folder
from finetune.runtime.terminal import json_text
from finetune.task.kernels import usable
from finetune.task.materials import Materials
from finetune.task.protocol import Task
from finetune.task.registry import build_task, reads

FOLDER = "inputs"
FACTS = "task_facts.json"

_FACTS: TypeAdapter[Mapping[str, Any]] = TypeAdapter(dict[str, Any])


@dataclass(frozen=True)
class Kept:
    """What was kept: enough to build the task again."""

    processing: Processing
    facts: Mapping[str, Any]

    def task(self, config: RunConfig, *, data: DataSection | None = None) -> Task:
        """Return the run's task, without any of its rows; `data` is the job's, settled for another model."""
        tokenizer, processor = self.processing.tokenizer, self.processing.processor
        kernel, _ = usable(config.train.loss_kernel)
        data = data or settled(config)
        return build_task(Materials(config.task, data, tokenizer, processor, facts=self.facts, loss_kernel=kernel))


def keep(run: Path, processing: Processing, facts: Mapping[str, Any]) -> None:
    """Write tokenizer (its chat template included), processor and facts into the run's folder. On one process."""
    with replaced(run / FOLDER) as staging:
        processing.save(staging)
        (staging / FACTS).write_text(json_text(facts, indent=1), encoding="utf-8")
        seal_folder(staging)


def load_kept(run: Path, config: RunConfig) -> Kept:
    """Return what the run has kept; raises UserError where there is nothing, or nothing that can be read.

    Code of a tokenizer runs where `model.trust_remote_code` says so.
    """
    folder = run / FOLDER
    if not folder.is_dir():
        raise UserError(
            f"{folder}: is not there. A run writes its tokenizer down when it starts; start the job once more (with "
            "`checkpoint.resume: auto` it goes on from where it is), or copy the tokenizer's files there."
        )
    _refuse_damage(folder)
    trusts, path = config.model.trust_remote_code, folder / FACTS
    processing = load_kept_processing(folder, reads=reads(config.task.name), key="run", trust_remote_code=trusts)
    try:
        return Kept(processing, parse_as(_FACTS, read_regular(path)) if path.is_file() else {})
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: is damaged: {error}") from error


def _refuse_damage(folder: Path) -> None:
    """Raise UserError where a file is not as it was written; folders from before there was a seal are believed."""
    damage = folder_damage(folder) if (folder / SEAL).is_file() else None
    if damage is not None:
        raise UserError(
            f"{folder}: {damage}: damaged or changed since the run wrote it. Start the job once more, which writes it "
            f"anew, or delete {SEAL} to use the files as they are."
        )
