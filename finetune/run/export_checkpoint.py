"""Any checkpoint of a run becomes a model folder: from the run's folder alone, in one process, without a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from finetune.checkpoint.inventory import choose, locate
from finetune.checkpoint.names import named_buffers, named_parameters
from finetune.checkpoint.reading import OpenCheckpoint, open_checkpoint
from finetune.checkpoint.record import BUFFER, PARAMETER
from finetune.config.load import LoadedConfig
from finetune.config.resolved import load_resolved
from finetune.config.rules.model import adapter_of
from finetune.config.run_config import RunConfig
from finetune.errors import CheckpointError, UserError
from finetune.export.card import CardFacts
from finetune.export.save import ExportReport, export_model
from finetune.run.final import inputs_of
from finetune.run.kept import Kept, load_kept
from finetune.run.model import build_model
from finetune.runtime.amounts import size_text
from finetune.runtime.construction import Construction
from finetune.runtime.log import quieten
from finetune.runtime.progress import Progress

_LISTED = 5


@dataclass(frozen=True)
class Export:
    """What is exported, and where to."""

    checkpoint: Path
    run: Path
    folder: Path
    dtype: str | None


def export_checkpoint(run: Path, *, step: int | None, to: Path | None, dtype: str | None) -> None:
    """Write the model of one checkpoint into a folder as the end of a run writes `final/`, and say where.

    Needs the run's folder and, for what is not trained, the base model that its job names; no data, no launcher.
    Raises UserError where the folder is there already, CheckpointError where the checkpoint is bad or another model's.
    """
    quieten(is_main=True)
    wanted = _wanted(run, step=step, to=to, dtype=dtype)
    loaded = load_resolved(wanted.run)
    checkpoint = open_checkpoint(wanted.checkpoint)
    report = _export(wanted, loaded, checkpoint=checkpoint, kept=load_kept(wanted.run, loaded.config))
    print(f"exported {wanted.checkpoint.name}: {report.num_tensors} tensors, {size_text(report.size_bytes)}")
    print(f"model in {report.folder}")


def exported_weights(model: object, checkpoint: OpenCheckpoint, *, trained_only: bool) -> dict[str, Tensor]:
    """Return the weights by canonical name: what is trained from the checkpoint, the rest as the model has it.

    Raises CheckpointError unless the checkpoint holds all of what this model trains, with its shapes, and nothing else.
    """
    parameters, buffers = named_parameters(model), named_buffers(model)  # type: ignore[arg-type]
    trained = {name: each for name, each in parameters.items() if each.requires_grad}
    _refuse_differences(checkpoint, {**trained, **buffers})
    weights: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        if name in trained:
            weights[name] = checkpoint.read(name)
        elif not trained_only:
            weights[name] = parameter.detach()
    if not trained_only:
        weights.update({name: checkpoint.read(name) for name in buffers})
    return weights


def _wanted(run: Path, *, step: int | None, to: Path | None, dtype: str | None) -> Export:
    place = locate(run)
    checkpoint = choose(place, step=step)
    folder = (to or place.run / "exports" / checkpoint.name).absolute()
    if folder.exists():
        raise UserError(f"{folder}: is there already. Name another folder with --to, or delete this one.")
    return Export(checkpoint, place.run, folder, dtype)


def _export(wanted: Export, loaded: LoadedConfig, *, checkpoint: OpenCheckpoint, kept: Kept) -> ExportReport:
    config, tokenizer = loaded.config, kept.processing.tokenizer
    model = build_model(config, task=kept.task(config), tokenizer=tokenizer, construction=Construction())
    is_base_elsewhere = adapter_of(config) is not None and config.model.name is not None
    return export_model(
        wanted.folder,
        model=model,
        weights=exported_weights(model, checkpoint, trained_only=is_base_elsewhere),
        inputs=inputs_of(kept.processing),
        section=config.export if wanted.dtype is None else config.export.model_copy(update={"dtype": wanted.dtype}),
        facts=_card(wanted, config, loaded=loaded, checkpoint=checkpoint),
    )


def _card(wanted: Export, config: RunConfig, *, loaded: LoadedConfig, checkpoint: OpenCheckpoint) -> CardFacts:
    progress = Progress.from_state_dict(checkpoint.progress)
    return CardFacts(
        title=wanted.run.name,
        task=config.task.name,
        num_steps=progress.step,
        metrics=progress.last_metrics,
        config_text=loaded.text,
        software=checkpoint.found.manifest.versions,
    )


def _refuse_differences(checkpoint: OpenCheckpoint, wanted: Mapping[str, Tensor]) -> None:
    held = {record.name: record.shape for record in checkpoint.model_records() if record.key in (PARAMETER, BUFFER)}
    lines = [
        f"  {what}: {', '.join(names[:_LISTED])}{f' and {len(names) - _LISTED} more' if len(names) > _LISTED else ''}"
        for what, names in (
            ("not in the checkpoint", [name for name in wanted if name not in held]),
            ("only in the checkpoint", [name for name in held if name not in wanted]),
            ("of another shape", [name for name in wanted if name in held and wanted[name].shape != held[name]]),
        )
        if names
    ]
    if lines:
        raise CheckpointError(
            f"{checkpoint.found.path} does not hold what the model in resolved.yaml trains\n" + "\n".join(lines)
        )
