"""`finetune export`: write a run's checkpoint, or a folder with an adapter, as a model folder; upload it to the hub.

A checkpoint is exported from the run folder alone, in one process, without a GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.checkpoint.format import layout
from finetune.checkpoint.format.tensor_file import BUFFER, PARAMETER, TensorRecord
from finetune.checkpoint.read.inventory import locate_run, select_checkpoint
from finetune.checkpoint.read.load import OpenCheckpoint, open_checkpoint
from finetune.checkpoint.sharding.state_layout import named_buffers, named_parameters
from finetune.commands.source import with_trust
from finetune.config.load import LoadedConfig, load_resolved
from finetune.config.rules.model import adapter_of
from finetune.config.sections.export import ExportSection
from finetune.config.sections.train import TrainSection
from finetune.data.templates.chat_template import stop_ids
from finetune.errors import CheckpointError, ModelError, UserError
from finetune.export.card import CardFacts
from finetune.export.push import push_folder
from finetune.export.save import ExportReport, Preprocessors, TextPreprocessor, export_model
from finetune.model.loading.saved import SavedModel, inspect_model_folder, load_saved_model
from finetune.model.processing import Processing, has_processing, load_saved_processing
from finetune.run.build.model import build_model
from finetune.run.final_export import (
    export_inputs,
    exports_trained_only,
    load_unquantized_base,
    require_mergeable,
    resolve_export_section,
)
from finetune.run.state.run_folder import RunInputs, load_run_inputs
from finetune.runtime.environment import package_versions
from finetune.runtime.parameters import InitContext
from finetune.runtime.progress import Progress
from finetune.runtime.resources import format_size
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER
from finetune.runtime.text.library_output import quiet_libraries
from finetune.train.evaluate import average_formula

_LISTED = 5


@dataclass(frozen=True)
class _CheckpointExport:
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
    quiet_libraries(is_main=True)
    wanted = _choose_checkpoint(run, step=step, to=to)
    own = with_trust(load_resolved(wanted.run), trust_remote_code=trust_remote_code)
    loaded = _with_export(own, dtype=dtype, merge=merge)
    require_mergeable(loaded.config)
    checkpoint = open_checkpoint(wanted.checkpoint)
    report = _export(wanted, loaded, checkpoint=checkpoint, run_inputs=load_run_inputs(wanted.run, loaded.config))
    print(f"exported {wanted.checkpoint.name}: {report.num_tensors} tensors, {format_size(report.size_bytes)}")
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
    _require_same_tensors(checkpoint, {**trained, **buffers})
    weights: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        if name in trained:
            weights[name] = _evaluation_weights(checkpoint, name, train=train)
        elif not trained_only:
            weights[name] = parameter.detach()
    if not trained_only:
        weights.update({name: checkpoint.read(name) for name in buffers})
    return weights


def _evaluation_weights(checkpoint: OpenCheckpoint, name: str, *, train: TrainSection) -> Tensor:
    weights, found = checkpoint.read(name), average_formula(train)
    if found is None:
        return weights
    key, formula = found
    state = TensorRecord(name, key, tuple(weights.shape), "F32").stored_name
    return formula(weights, checkpoint.read(state)).to(weights.dtype) if state in checkpoint.records else weights


def _choose_checkpoint(run: Path, *, step: int | None, to: Path | None) -> _CheckpointExport:
    place = locate_run(run)
    checkpoint = select_checkpoint(place, step=step)
    folder = (to or place.run / "exports" / checkpoint.name).absolute()
    if folder.exists():
        raise UserError(f"{folder}: is there already. Name another folder with --to, or delete this one.")
    return _CheckpointExport(checkpoint, place.run, folder)


def _with_export(loaded: LoadedConfig, *, dtype: str | None, merge: bool) -> LoadedConfig:
    """Return the run's config with what the command says of the export."""
    if merge and adapter_of(loaded.config) is None:
        raise UserError("--merge: this run has no adapter; its checkpoints are whole models. Leave --merge out.")
    section = loaded.config.export
    asked = {"dtype": section.dtype if dtype is None else dtype, "merge": section.merge or merge}
    export = section.model_copy(update=asked)
    return replace(loaded, config=loaded.config.model_copy(update={"export": export}))


def _export(
    wanted: _CheckpointExport, loaded: LoadedConfig, *, checkpoint: OpenCheckpoint, run_inputs: RunInputs
) -> ExportReport:
    config, tokenizer, task = loaded.config, run_inputs.processing.tokenizer, run_inputs.task(loaded.config)
    model = build_model(config, task=task, tokenizer=tokenizer, construction=InitContext())
    weights = exported_weights(model, checkpoint, train=config.train, trained_only=exports_trained_only(config))
    return export_model(
        wanted.folder,
        model=model,
        weights=weights | load_unquantized_base(config, task, tokenizer=tokenizer, log=print),
        preprocessors=export_inputs(run_inputs.processing),
        section=resolve_export_section(config),
        facts=_card(wanted, loaded=loaded, checkpoint=checkpoint, head=task.head),
    )


def _card(wanted: _CheckpointExport, *, loaded: LoadedConfig, checkpoint: OpenCheckpoint, head: str) -> CardFacts:
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


def _require_same_tensors(checkpoint: OpenCheckpoint, wanted: Mapping[str, Tensor]) -> None:
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


_READS = {"image_classification": "images", "image_text_to_text": "both"}


def export(
    source: Path,
    *,
    step: int | None,
    to: Path | None,
    dtype: str | None,
    merge: bool,
    push_to_hub: str | None,
    public: bool = False,
    trust_remote_code: bool = False,
) -> None:
    """Export a checkpoint of a run, merge the adapter of any folder, or push a folder as it is; say what was done.

    Raises UserError where there is nothing to do or the target is there already, HubError where the upload failed: what
    was exported stays.
    """
    quiet_libraries(is_main=True)
    if is_run(source):
        folder = export_checkpoint(
            source, step=step, to=to, dtype=dtype, merge=merge, trust_remote_code=trust_remote_code
        )
    else:
        if step is not None:
            raise UserError(f"--step {step}: {source} has no checkpoints. Name a run's folder, or leave --step out.")
        saved = inspect_model_folder(source, key="export", trust_remote_code=trust_remote_code)
        folder = _export_folder(
            saved, to=to, dtype=dtype, merge=merge, is_pushed=push_to_hub is not None, trusts=trust_remote_code
        )
    if push_to_hub is not None:
        print(f"uploaded to {push_folder(folder, push_to_hub, private=not public)}")


def is_run(folder: Path) -> bool:
    """Tell whether a run with checkpoints, or one of its checkpoints, is meant, and not a model folder."""
    place = folder.expanduser().absolute()
    names_checkpoint = (place / layout.MANIFEST).is_file() or layout.step_of(place) is not None
    return names_checkpoint or bool(layout.steps(place) or layout.steps(place / CHECKPOINTS_FOLDER))


def _export_folder(
    saved: SavedModel, *, to: Path | None, dtype: str | None, merge: bool, is_pushed: bool, trusts: bool
) -> Path:
    """Return the folder of the model that was asked for: a new one, or this one where only its upload was."""
    if merge and saved.adapter is None:
        raise UserError(f"--merge: {saved.folder} holds a whole model and no adapter. Leave --merge out.")
    if not merge and dtype is None and to is None:
        if is_pushed:
            return saved.folder
        raise UserError(
            f"{saved.folder} is a model folder already. Write --merge to merge an adapter, --dtype for another type, "
            "or --push-to-hub NAME to upload it."
        )
    if not merge and saved.adapter is not None:
        raise UserError(f"{saved.folder} holds an adapter. Write --merge too; without it, there is nothing to convert.")
    folder = (to or saved.folder.with_name(f"{saved.folder.name}-{'merged' if merge else dtype}")).absolute()
    if folder.exists():
        raise UserError(f"{folder}: is there already. Name another folder with --to, or delete this one.")
    report = _write(saved, folder, section=ExportSection(dtype=dtype, merge=merge), trusts=trusts)  # type: ignore[arg-type]
    print(f"exported {saved.folder.name}: {report.num_tensors} tensors, {format_size(report.size_bytes)}")
    print(f"model in {report.folder}")
    return report.folder


def _write(saved: SavedModel, folder: Path, *, section: ExportSection, trusts: bool) -> ExportReport:
    model = load_saved_model(saved, key="export", trust_remote_code=trusts)
    return export_model(
        folder,
        model=model,
        weights=_weights(model),
        preprocessors=inputs_in(saved, trust_remote_code=trusts),
        section=section,
        facts=CardFacts(
            title=folder.name,
            task=saved.head,
            num_steps=0,
            metrics={},
            config_text="",
            software=package_versions(),
            head=saved.head,
        ),
    )


def _weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: each.detach() for name, each in (*model.named_parameters(), *model.named_buffers())}


def inputs_in(saved: SavedModel, *, trust_remote_code: bool) -> Preprocessors:
    """Return the tokenizer and processor that lie in the folder; none where there are none."""
    processing = processing_in(saved, trust_remote_code=trust_remote_code)
    tokenizer = processing.tokenizer
    return Preprocessors(
        None if tokenizer is None else TextPreprocessor(tokenizer, stop_ids(tokenizer)), processing.processor
    )


def processing_in(saved: SavedModel, *, trust_remote_code: bool) -> Processing:
    """Return what lies in the folder, or with the adapter's base; nothing where neither has it.

    Raises ModelError where it is there and cannot be read.
    """
    reads: Any = _READS.get(saved.head, "text")
    for place in dict.fromkeys((str(saved.folder), saved.base)):
        if not Path(place).is_dir() or has_processing(Path(place), reads=reads):
            try:
                return load_saved_processing(place, reads=reads, key="tokenizer", trust_remote_code=trust_remote_code)
            except ModelError as error:
                if not isinstance(error.__cause__, OSError):  # there is none in the local cache
                    raise
    return Processing()
