"""What a run keeps in its folder of how rows become inputs, so that a checkpoint is exported without its data."""

import hashlib
import json
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
from finetune.task.kernels import usable
from finetune.task.materials import Materials
from finetune.task.protocol import Task
from finetune.task.registry import build_task, reads

FOLDER = "inputs"
FACTS = "task_facts.json"
DIGESTS = "digests.json"
"""The SHA-256 of every other file there; folders from before there were digests lack it."""

_DIGESTS: TypeAdapter[Mapping[str, str]] = TypeAdapter(dict[str, str])
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
        (staging / FACTS).write_text(json.dumps(facts, ensure_ascii=False, indent=1), encoding="utf-8")
        (staging / DIGESTS).write_text(json.dumps(_digests(staging), indent=1), encoding="utf-8")


def load_kept(run: Path, config: RunConfig) -> Kept:
    """Return what the run has kept; raises UserError where there is nothing."""
    folder = run / FOLDER
    if not folder.is_dir():
        raise UserError(
            f"{folder}: is not there. A run writes its tokenizer down when it starts; start the job once more (with "
            "`checkpoint.resume: auto` it goes on from where it is), or copy the tokenizer's files there."
        )
    _refuse_damage(folder)
    try:
        processing = load_kept_processing(folder, reads=reads(config.task.name))
        path = folder / FACTS
        return Kept(processing, parse_as(_FACTS, read_regular(path)) if path.is_file() else {})
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: holds no tokenizer or processor that can be loaded: {error}") from error


def _refuse_damage(folder: Path) -> None:
    """Raise UserError where a file is not as it was written."""
    path = folder / DIGESTS
    if not path.is_file():
        return
    try:
        wanted = parse_as(_DIGESTS, read_regular(path))
        found = _digests(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}. {_ADVICE}") from error
    bad = sorted(name for name, digest in wanted.items() if found.get(name) != digest)
    if bad:
        raise UserError(f"{folder}: {', '.join(bad)} is not as the run wrote it: damaged or changed. {_ADVICE}")


def _digests(folder: Path) -> dict[str, str]:
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != DIGESTS)
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


_ADVICE = f"Start the job once more, which writes it anew, or delete {DIGESTS} to use the files as they are."
