"""`finetune export`: a run's checkpoint, or a folder with an adapter, becomes a model folder, and goes to the hub."""

from pathlib import Path
from typing import Any

import torch

from finetune.checkpoint import layout
from finetune.config.sections.export import ExportSection
from finetune.data.encoding.chat import stop_ids
from finetune.errors import ModelError, UserError
from finetune.export.card import CardFacts
from finetune.export.generation import Inputs, Language
from finetune.export.push import push_folder
from finetune.export.save import ExportReport, export_model
from finetune.model.processing import Processing, has_processing, load_kept_processing
from finetune.model.saved import SavedModel, load_saved, look_at
from finetune.run.export_checkpoint import export_checkpoint
from finetune.runtime.amounts import size_text
from finetune.runtime.environment import package_versions
from finetune.runtime.log import quieten

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
    quieten(is_main=True)
    if is_run(source):
        folder = export_checkpoint(
            source, step=step, to=to, dtype=dtype, merge=merge, trust_remote_code=trust_remote_code
        )
    else:
        if step is not None:
            raise UserError(f"--step {step}: {source} has no checkpoints. Name a run's folder, or leave --step out.")
        saved = look_at(source, key="export", trust_remote_code=trust_remote_code)
        folder = _export_folder(
            saved, to=to, dtype=dtype, merge=merge, is_pushed=push_to_hub is not None, trusts=trust_remote_code
        )
    if push_to_hub is not None:
        print(f"uploaded to {push_folder(folder, push_to_hub, private=not public)}")


def is_run(folder: Path) -> bool:
    """Tell whether a run with checkpoints, or one of its checkpoints, is meant, and not a model folder."""
    place = folder.expanduser().absolute()
    names_checkpoint = (place / layout.MANIFEST).is_file() or layout.step_of(place) is not None
    return names_checkpoint or bool(layout.steps(place) or layout.steps(place / layout.CHECKPOINTS))


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
    print(f"exported {saved.folder.name}: {report.num_tensors} tensors, {size_text(report.size_bytes)}")
    print(f"model in {report.folder}")
    return report.folder


def _write(saved: SavedModel, folder: Path, *, section: ExportSection, trusts: bool) -> ExportReport:
    model = load_saved(saved, key="export", trust_remote_code=trusts)
    return export_model(
        folder,
        model=model,
        weights=_values(model),
        inputs=inputs_in(saved, trust_remote_code=trusts),
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


def _values(model: Any) -> dict[str, torch.Tensor]:
    return {name: each.detach() for name, each in (*model.named_parameters(), *model.named_buffers())}


def inputs_in(saved: SavedModel, *, trust_remote_code: bool) -> Inputs:
    """Return the tokenizer and processor that lie in the folder; none where there are none."""
    processing = processing_in(saved, trust_remote_code=trust_remote_code)
    tokenizer = processing.tokenizer
    return Inputs(None if tokenizer is None else Language(tokenizer, stop_ids(tokenizer)), processing.processor)


def processing_in(saved: SavedModel, *, trust_remote_code: bool) -> Processing:
    """Return what lies in the folder, or with the adapter's base; nothing where neither has it.

    Raises ModelError where it is there and cannot be read.
    """
    reads: Any = _READS.get(saved.head, "text")
    for place in dict.fromkeys((str(saved.folder), saved.base)):
        if not Path(place).is_dir() or has_processing(Path(place), reads=reads):
            try:
                return load_kept_processing(place, reads=reads, key="tokenizer", trust_remote_code=trust_remote_code)
            except ModelError as error:
                if not isinstance(error.__cause__, OSError):  # there is none in the local cache
                    raise
    return Processing()
