"""Any checkpoint of a run becomes a model folder: from the run's folder alone, in one process, without a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from finetune.checkpoint.inventory import choose, locate
from finetune.checkpoint.names import named_buffers, named_parameters
from finetune.checkpoint.reading import OpenCheckpoint, open_checkpoint
from finetune.checkpoint.record import BUFFER, PARAMETER, TensorRecord
from finetune.config.load import LoadedConfig
from finetune.config.resolved import load_resolved
from finetune.config.rules.model import adapter_of
from finetune.config.sections.train import TrainSection
from finetune.errors import CheckpointError, UserError
from finetune.export.card import CardFacts
from finetune.export.save import ExportReport, export_model
from finetune.run.final import inputs_of
from finetune.run.kept import Kept, load_kept
from finetune.run.merging import needs_trained_only, original_weights, require_mergeable, written_section
from finetune.run.model import build_model
from finetune.run.trust import with_trust
from finetune.runtime.amounts import size_text
from finetune.runtime.construction import Construction
from finetune.runtime.log import quieten
from finetune.runtime.progress import Progress
from finetune.train.weights import averaging

_LISTED = 5


@dataclass(frozen=True)
class Export:
    """What is exported, and where to."""

    checkpoint: Path
    run: Path
    folder: Path


def export_checkpoint(
    run: Path,
    *,
    step: int | None,
    to: Path | None,
    dtype: str | None,
    merge: bool = False,
    trust_remote_code: bool = False,
) -> Path:
    """Write the model of one checkpoint into a folder as the end of a run writes `final/`, say where and return it.

    With `merge` an adapter becomes part of its base, as it does where the run's `export.merge` says so. Needs the run's
    folder and, for what is not trained, the base model that its job names; no data, no launcher. Raises UserError where
    the folder is there already or nothing can be merged, CheckpointError where the checkpoint is bad or another
    model's.
    """
    quieten(is_main=True)
    wanted = _wanted(run, step=step, to=to)
    own = with_trust(load_resolved(wanted.run), trust_remote_code=trust_remote_code)
    loaded = _with_export(own, dtype=dtype, merge=merge)
    require_mergeable(loaded.config)
    checkpoint = open_checkpoint(wanted.checkpoint)
    report = _export(wanted, loaded, checkpoint=checkpoint, kept=load_kept(wanted.run, loaded.config))
    print(f"exported {wanted.checkpoint.name}: {report.num_tensors} tensors, {size_text(report.size_bytes)}")
    print(f"model in {report.folder}")
    return report.folder


def exported_weights(
    model: object, checkpoint: OpenCheckpoint, *, train: TrainSection, trained_only: bool
) -> dict[str, Tensor]:
    """Return the weights by canonical name: what is trained from the checkpoint, the rest as the model has it.

    Of a run that evaluates an average of its weights, it is the average that is exported.
    Raises CheckpointError unless the checkpoint holds all of what this model trains, with its shapes, and nothing else.
    """
    parameters, buffers = named_parameters(model), named_buffers(model)  # type: ignore[arg-type]
    trained = {name: each for name, each in parameters.items() if each.requires_grad}
    _refuse_differences(checkpoint, {**trained, **buffers})
    weights: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        if name in trained:
            weights[name] = _evaluated(checkpoint, name, train=train)
        elif not trained_only:
            weights[name] = parameter.detach()
    if not trained_only:
        weights.update({name: checkpoint.read(name) for name in buffers})
    return weights


def _evaluated(checkpoint: OpenCheckpoint, name: str, *, train: TrainSection) -> Tensor:
    weights, found = checkpoint.read(name), averaging(train)
    if found is None:
        return weights
    key, formula = found
    state = TensorRecord(name, key, tuple(weights.shape), "F32").stored_name
    return formula(weights, checkpoint.read(state)).to(weights.dtype) if state in checkpoint.records else weights


def _wanted(run: Path, *, step: int | None, to: Path | None) -> Export:
    place = locate(run)
    checkpoint = choose(place, step=step)
    folder = (to or place.run / "exports" / checkpoint.name).absolute()
    if folder.exists():
        raise UserError(f"{folder}: is there already. Name another folder with --to, or delete this one.")
    return Export(checkpoint, place.run, folder)


def _with_export(loaded: LoadedConfig, *, dtype: str | None, merge: bool) -> LoadedConfig:
    """Return the run's config with what the command says of the export."""
    if merge and adapter_of(loaded.config) is None:
        raise UserError("--merge: this run has no adapter; its checkpoints are whole models. Leave --merge out.")
    section = loaded.config.export
    asked = {"dtype": section.dtype if dtype is None else dtype, "merge": section.merge or merge}
    export = section.model_copy(update=asked)
    return replace(loaded, config=loaded.config.model_copy(update={"export": export}))


def _export(wanted: Export, loaded: LoadedConfig, *, checkpoint: OpenCheckpoint, kept: Kept) -> ExportReport:
    config, tokenizer, task = loaded.config, kept.processing.tokenizer, kept.task(loaded.config)
    model = build_model(config, task=task, tokenizer=tokenizer, construction=Construction())
    weights = exported_weights(model, checkpoint, train=config.train, trained_only=needs_trained_only(config))
    return export_model(
        wanted.folder,
        model=model,
        weights=weights | original_weights(config, task, tokenizer=tokenizer, say=print),
        inputs=inputs_of(kept.processing),
        section=written_section(config),
        facts=_card(wanted, loaded=loaded, checkpoint=checkpoint, head=task.head),
    )


def _card(wanted: Export, *, loaded: LoadedConfig, checkpoint: OpenCheckpoint, head: str) -> CardFacts:
    progress = Progress.from_state_dict(checkpoint.progress)
    return CardFacts(
        title=wanted.run.name,
        task=loaded.config.task.name,
        num_steps=progress.step,
        metrics=progress.last_metrics,
        config_text=loaded.text,
        software=checkpoint.found.manifest.versions,
        head=head,
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
