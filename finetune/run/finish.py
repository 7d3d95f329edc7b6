"""From the first step to what the run leaves behind."""

import time
from pathlib import Path

from finetune.checkpoint.gather import gather_weights
from finetune.config.explain import resolved_yaml
from finetune.config.load import LoadedConfig
from finetune.data.chat import stop_ids
from finetune.errors import NonFiniteError
from finetune.export.card import CardFacts
from finetune.export.generation import Language
from finetune.export.save import export_model
from finetune.report.events import Noted, RunEnded
from finetune.run.lessons import Lessons
from finetune.run.machine import Machine
from finetune.runtime import ranks
from finetune.runtime.amounts import size_text
from finetune.runtime.environment import package_versions
from finetune.runtime.progress import Progress
from finetune.train.loop import EARLY, FINISHED, train
from finetune.train.parts import Parts

EXPORTED_AFTER = (FINISHED, EARLY)
"""Why a run may end so that its model is final; after a signal or a limit it is to be continued."""

EXIT_CODES = {"signal SIGTERM": 143, "signal SIGINT": 130}
"""As a shell counts them; every other end is a success."""


def train_to_the_end(
    loaded: LoadedConfig, parts: Parts, *, progress: Progress, lessons: Lessons, machine: Machine
) -> int:
    """Train, export the model where the run is over, report the end and return the exit code. Collective."""
    started = time.monotonic()
    section, folder = loaded.config.evaluate, Path(loaded.config.run.folder) / "final"
    if section is not None and section.at_start and progress.step == 0:
        parts.evaluate(progress.step)
    try:
        reason = train(parts, progress)
    except NonFiniteError:  # raised on every rank alike
        parts.report_steps()
        raise
    is_final = reason in EXPORTED_AFTER
    if is_final:
        _export(loaded, parts, progress=progress, lessons=lessons, machine=machine, folder=folder)
    parts.reporter(
        RunEnded(
            step=progress.step,
            reason=reason,
            seconds=time.monotonic() - started,
            metrics=progress.last_metrics,
            final_folder=str(folder) if is_final else None,
        )
    )
    return EXIT_CODES.get(reason, 0)


def _export(
    loaded: LoadedConfig, parts: Parts, *, progress: Progress, lessons: Lessons, machine: Machine, folder: Path
) -> None:
    """Gather the weights and write them on the main rank; an adapter's base only where it exists nowhere else."""
    section = loaded.config.model
    is_base_elsewhere = section.lora is not None and section.name is not None
    weights = gather_weights(machine.accelerator, machine.model, trained_only=is_base_elsewhere)
    if ranks.is_main():
        report = export_model(
            folder,
            model=machine.plain_model,
            weights=weights,
            language=Language(lessons.tokenizer, stop_ids(lessons.tokenizer)),
            section=loaded.config.export,
            facts=CardFacts(
                title=Path(loaded.config.run.folder).name,
                task=loaded.config.task.name,
                num_steps=progress.step,
                metrics=progress.last_metrics,
                config_text=resolved_yaml(loaded),
                software=package_versions(),
            ),
        )
        tensors = f"{report.num_tensors} tensors, {size_text(report.size_bytes)}"
        parts.reporter(Noted(progress.step, f"exported {tensors}, to {folder}"))
    ranks.barrier()  # nobody leaves while the main rank is still writing
