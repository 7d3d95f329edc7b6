"""`final/`: the model that a run leaves behind, and the record of which step it is from."""

from collections.abc import Iterable
from pathlib import Path

import psutil
from torch import Tensor

from finetune.checkpoint.gather import gather_weights
from finetune.config.explain import resolved_yaml
from finetune.config.load import LoadedConfig
from finetune.data.encoding.chat import stop_ids
from finetune.errors import DiskError
from finetune.export.card import CardFacts
from finetune.export.generation import Inputs, Language
from finetune.export.save import ExportReport, export_model
from finetune.model.processing import Processing
from finetune.report.events import Noted
from finetune.report.reporter import Reporter
from finetune.run.input_stamps import input_stamps
from finetune.run.lessons import Lessons
from finetune.run.machine import Machine
from finetune.run.merging import needs_trained_only, original_weights, written_section
from finetune.run.over import FOLDER, RECORD, is_exported
from finetune.run.weights import make_weights
from finetune.runtime import files, ranks
from finetune.runtime.amounts import size_text
from finetune.runtime.disk import free_bytes
from finetune.runtime.environment import package_versions
from finetune.runtime.progress import Progress
from finetune.runtime.waypoints import reach

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def export_final(
    loaded: LoadedConfig, reporter: Reporter, *, progress: Progress, lessons: Lessons, machine: Machine, reason: str
) -> None:
    """Gather the weights and write them on the main rank, unless they are there already. Collective.

    An adapter's base is written only where it exists nowhere else, or where the adapter is merged into it.
    """
    run_folder = Path(loaded.config.run.folder)
    is_there = ranks.is_main() and is_exported(run_folder, step=progress.step, section=loaded.config.export)
    if ranks.broadcast_object(is_there):
        reporter(Noted(progress.step, f"{run_folder / FOLDER} is there already, from this very step"))
        return
    reach("export.begin", step=progress.step)
    with make_weights(loaded.config, machine).evaluated():
        weights = gather_weights(machine.accelerator, machine.model, trained_only=needs_trained_only(loaded.config))
    reach("export.write", step=progress.step)
    if ranks.is_main():
        _require_room(run_folder, weights.values(), dtype=loaded.config.export.dtype)
        (run_folder / RECORD).unlink(missing_ok=True)
        report = export_model(
            run_folder / FOLDER,
            model=machine.plain_model,
            weights=weights | original_weights(loaded.config, lessons.task, tokenizer=lessons.tokenizer, say=print),
            inputs=inputs_of(lessons.processing),
            section=written_section(loaded.config),
            facts=_card(loaded, progress, head=lessons.task.head),
        )
        _record(loaded, report, step=progress.step, reason=reason)
        tensors = f"{report.num_tensors} tensors, {size_text(report.size_bytes)}"
        reporter(Noted(progress.step, f"exported {tensors}, to {run_folder / FOLDER}"))
    reach("export.done", step=progress.step)
    ranks.barrier()  # nobody leaves while the main rank is still writing


def _require_room(run_folder: Path, weights: Iterable[Tensor], *, dtype: str | None) -> None:
    """Raise DiskError where there is no room for the weights in this type, beside a `final/` that is there already."""
    free = free_bytes(run_folder)
    num_bytes = sum(weight.numel() * (_ITEM_BYTES[dtype] if dtype else weight.itemsize) for weight in weights)
    if free < num_bytes:
        raise DiskError(
            f"{run_folder / FOLDER}: the model needs {size_text(num_bytes)} and {size_text(free)} are free. Make room; "
            "the same command continues from the newest checkpoint and writes it."
        )


def inputs_of(processing: Processing) -> Inputs:
    """Return what is exported beside the weights."""
    tokenizer = processing.tokenizer
    language = None if tokenizer is None else Language(tokenizer, stop_ids(tokenizer))
    return Inputs(language, processing.processor)


def _card(loaded: LoadedConfig, progress: Progress, *, head: str) -> CardFacts:
    return CardFacts(
        title=Path(loaded.config.run.folder).name,
        task=loaded.config.task.name,
        num_steps=progress.step,
        metrics=progress.last_metrics,
        config_text=resolved_yaml(loaded),
        software=package_versions(),
        head=head,
    )


def _record(loaded: LoadedConfig, report: ExportReport, *, step: int, reason: str) -> None:
    sizes = {name: (report.folder / name).stat().st_size for name in report.files}
    facts = {"step": step, "reason": reason, "export": loaded.config.export.model_dump(), "files": sizes}
    facts |= {"inputs": input_stamps(loaded.config, before=psutil.Process().create_time())}
    files.write_json(Path(loaded.config.run.folder) / RECORD, facts)
