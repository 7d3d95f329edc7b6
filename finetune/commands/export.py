"""`finetune export`: write a run's checkpoint, or a folder with an adapter, as a model folder; upload it to the hub.

A checkpoint is exported from the run folder alone, in one process, without a GPU. An export is verified: the logits of
the model in memory, in float32, are compared with the folder's.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from finetune.checkpoint.format import layout
from finetune.checkpoint.format.tensor_file import BUFFER, PARAMETER, TensorRecord
from finetune.checkpoint.read.inventory import locate_run, select_checkpoint
from finetune.checkpoint.read.load import OpenCheckpoint, open_checkpoint
from finetune.checkpoint.sharding.state_layout import named_buffers, named_parameters
from finetune.commands.source import new_folder, with_trust
from finetune.config.load import RESOLVED_NAME, LoadedConfig, load_resolved
from finetune.config.rules.model import adapter_of
from finetune.config.sections.export import ExportSection
from finetune.config.sections.train import TrainSection
from finetune.data.templates.chat_template import stop_ids
from finetune.data.templates.rendering import arguments_of
from finetune.errors import CheckpointError, ModelError, UserError
from finetune.export.card import CardFacts, vllm_hint
from finetune.export.save import ExportReport, Preprocessors, TextPreprocessor, export_model, push_folder
from finetune.export.verify.rows import VerificationRow, expected_tokens, logits_of, synthetic_rows
from finetune.export.verify.verifier import ExpectedOutputs, ExportVerifier, model_facts, staged_export
from finetune.export.weights import unwrap_adapter
from finetune.model.adapters.context import has_adapter
from finetune.model.build import build_model
from finetune.model.loading.saved import SavedModel, inspect_model_folder, load_saved_model
from finetune.model.processing import Processing, has_processing, load_saved_processing
from finetune.registry.tasks import reads_of_head
from finetune.run.final_export import (
    MERGED_UNQUANTIZED,
    export_inputs,
    exports_trained_only,
    load_options,
    load_unquantized_base,
    resolve_export_section,
    template_renders,
)
from finetune.run.setup.model_problems import parameters_in, require_valid_merge
from finetune.run.state.run_folder import load_run_inputs
from finetune.runtime.environment import package_versions
from finetune.runtime.parameters import InitContext
from finetune.runtime.progress import Progress
from finetune.runtime.resources import available_bytes, format_size
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER, FINAL_FOLDER
from finetune.runtime.text.terminal import quiet_libraries
from finetune.train.evaluate import average_formula

_MAX_LISTED = 5


def export_checkpoint(
    run: Path,
    *,
    step: int | None,
    to: Path | None,
    dtype: str | None,
    merge: bool = False,
    trust_remote_code: bool = False,
    verify: bool | None = None,
) -> Path:
    """Write the model of one checkpoint to a folder, as the end of a run writes `final/`; print and return the folder.

    With `merge`, an adapter is merged into its base, as with the run's `export.merge`; `verify` None is the job's own.
    Needs the run's folder and, for frozen weights, the base model of its job; no data and no launcher. Raises UserError
    if the folder exists or nothing can be merged, CheckpointError if the checkpoint is bad or does not match the model,
    ExportError if the written model differs from the trained one.
    """
    quiet_libraries(is_main=True)
    location = locate_run(run)
    chosen = select_checkpoint(location, step=step)
    folder = new_folder(to or location.run / "exports" / chosen.name)
    own = with_trust(load_resolved(location.run), trust_remote_code=trust_remote_code)
    loaded = _with_export(own, dtype=dtype, merge=merge, verify=verify)
    require_valid_merge(loaded.config)
    checkpoint = open_checkpoint(chosen)
    run_inputs = load_run_inputs(location.run, loaded.config)
    config, tokenizer, task = loaded.config, run_inputs.processing.tokenizer, run_inputs.task(loaded.config)
    recorded = parameters_in(chosen)
    model = build_model(
        config.model,
        head=task.head,
        head_values=task.head_values,
        tokenizer=tokenizer,
        seed=config.run.seed,
        init_context=InitContext(),
        recorded=recorded,
    )
    weights = exported_weights(model, checkpoint, train=config.train, trained_only=exports_trained_only(config))
    source = ModelToExport(
        model=model,
        weights=weights | load_unquantized_base(config, task, tokenizer=tokenizer, log=print),
        preprocessors=export_inputs(run_inputs.processing, task, model),
        section=resolve_export_section(config),
        facts=_card(location.run, loaded=loaded, checkpoint=checkpoint, head=task.head),
        trust_remote_code=config.model.trust_remote_code,
        is_quantized=config.model.quantization is not None,
        load_options=load_options(config.model),
    )
    report = export_verified(source, folder, verify=config.export.verify, log=print)
    print(f"exported {chosen.name}: {report.num_tensors} tensors, {format_size(report.size_bytes)}")
    print(f"model in {report.folder}")
    return report.folder


def _card(run: Path, *, loaded: LoadedConfig, checkpoint: OpenCheckpoint, head: str) -> CardFacts:
    progress = Progress.from_state_dict(checkpoint.progress)
    return CardFacts(
        title=run.name,
        task=loaded.config.task.name,
        num_steps=progress.step,
        metrics=progress.last_metrics,
        config_text=loaded.text,
        software=checkpoint.verified.manifest.versions,
        head=head,
        config_values=loaded.config.model.config_changes,
    )


def exported_weights(
    model: object, checkpoint: OpenCheckpoint, *, train: TrainSection, trained_only: bool
) -> dict[str, Tensor]:
    """Return the weights by canonical name: trained ones from the checkpoint, the others from the model.

    If the run evaluates an average of its weights, the average is exported. Raises CheckpointError unless the
    checkpoint has exactly the tensors that this model trains, with the same shapes.
    """
    parameters, buffers = named_parameters(model), named_buffers(model)  # type: ignore[arg-type]
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    _require_same_tensors(checkpoint, {**trained, **buffers})
    weights: dict[str, Tensor] = {}
    average = average_formula(train)
    for name, parameter in parameters.items():
        if name in trained:
            own = checkpoint.read(name)
            if average is not None:
                key, formula = average
                state = TensorRecord(name, key, tuple(own.shape), "F32").stored_name
                own = formula(own, checkpoint.read(state)).to(own.dtype) if state in checkpoint.records else own
            weights[name] = own
        elif not trained_only:
            weights[name] = parameter.detach()
    if not trained_only:
        weights.update({name: checkpoint.read(name) for name in buffers})
    return weights


def _with_export(loaded: LoadedConfig, *, dtype: str | None, merge: bool, verify: bool | None) -> LoadedConfig:
    """Return the run's config with the command's options for the export."""
    if merge and adapter_of(loaded.config) is None:
        raise UserError("--merge: this run has no adapter; its checkpoints are full models. Remove --merge.")
    section = loaded.config.export
    options = {"dtype": section.dtype if dtype is None else dtype, "merge": section.merge or merge}
    options |= {"verify": section.verify if verify is None else verify}
    export = section.model_copy(update=options)
    return replace(loaded, config=loaded.config.model_copy(update={"export": export}))


def _require_same_tensors(checkpoint: OpenCheckpoint, expected: Mapping[str, Tensor]) -> None:
    saved = {record.name: record.shape for record in checkpoint.model_records() if record.key in (PARAMETER, BUFFER)}
    lines = [
        f"  {problem}: {', '.join(names[:_MAX_LISTED])}"
        + (f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else "")
        for problem, names in (
            ("missing from the checkpoint", [name for name in expected if name not in saved]),
            ("only in the checkpoint", [name for name in saved if name not in expected]),
            ("different shape", [name for name in expected if name in saved and expected[name].shape != saved[name]]),
        )
        if names
    ]
    if lines:
        raise CheckpointError(
            f"{checkpoint.verified.path} does not match the model in resolved.yaml\n" + "\n".join(lines)
        )


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
    verify: bool | None = None,
) -> Path:
    """Export a checkpoint of a run, merge the adapter of any folder, or upload a folder; print it, return the folder.

    Raises UserError if there is nothing to do or the target exists, HubError if the upload failed; the exported folder
    is kept then.
    """
    quiet_libraries(is_main=True)
    if is_run(source):
        folder = export_checkpoint(
            source, step=step, to=to, dtype=dtype, merge=merge, trust_remote_code=trust_remote_code, verify=verify
        )
    else:
        if step is not None:
            raise UserError(f"--step {step}: {source} has no checkpoints. Give a run's folder, or remove --step.")
        saved = inspect_model_folder(source, key="export", trust_remote_code=trust_remote_code)
        folder = _export_folder(
            saved,
            to=to,
            dtype=dtype,
            merge=merge,
            is_pushed=push_to_hub is not None,
            trust_remote_code=trust_remote_code,
            verify=verify is not False,
        )
    if hint := vllm_hint(folder):
        print(hint)
    if push_to_hub is not None:
        print(f"uploaded to {push_folder(folder, push_to_hub, private=not public)}")
    return folder


def is_run(folder: Path) -> bool:
    """Return whether the folder is a run with checkpoints, or one of its checkpoints, rather than a model folder."""
    path = folder.expanduser().absolute()
    is_checkpoint = (path / layout.MANIFEST).is_file() or layout.step_of(path) is not None
    return is_checkpoint or bool(layout.steps(path) or layout.steps(path / CHECKPOINTS_FOLDER))


def _export_folder(
    saved: SavedModel,
    *,
    to: Path | None,
    dtype: str | None,
    merge: bool,
    is_pushed: bool,
    trust_remote_code: bool,
    verify: bool,
) -> Path:
    """Return the folder of the requested model: a new one, or this one if it is only uploaded."""
    if merge and saved.adapter is None:
        raise UserError(f"--merge: {saved.folder} has a full model without an adapter. Remove --merge.")
    if not merge and dtype is None and to is None:
        if is_pushed:
            return saved.folder
        raise UserError(
            f"{saved.folder} is already a model folder. Add --merge to merge an adapter, --dtype to convert the "
            "weights, or --push-to-hub NAME to upload it."
        )
    if not merge and saved.adapter is not None:
        raise UserError(f"{saved.folder} has an adapter, whose dtype can only be converted by merging: add --merge.")
    folder = new_folder(to or saved.folder.with_name(f"{saved.folder.name}-{'merged' if merge else dtype}"))
    if merge and saved.folder.name == FINAL_FOLDER and (saved.folder.parent / RESOLVED_NAME).is_file():
        dtype = _dtype_of_run(saved.folder.parent, dtype=dtype)
    section = ExportSection(dtype=dtype, merge=merge, verify=verify)  # type: ignore[arg-type]
    report = _write(saved, folder, section=section, trust_remote_code=trust_remote_code)
    print(f"exported {saved.folder.name}: {report.num_tensors} tensors, {format_size(report.size_bytes)}")
    print(f"model in {report.folder}")
    return report.folder


def _dtype_of_run(run: Path, *, dtype: str | None) -> str | None:
    """Return the dtype in which the run would write its merged adapter, by default the dtype of its base.

    Prints that the run's base was quantized; raises ModelError if the adapter must not be merged.
    """
    try:
        config = _with_export(load_resolved(run), dtype=dtype, merge=True, verify=None).config
    except UserError as error:
        print(f"warning: the job that trained the adapter cannot be read, so its dtype is not used. {error}")
        return dtype
    require_valid_merge(config)
    if config.model.quantization is not None:
        print(MERGED_UNQUANTIZED)
    return config.export.dtype or config.model.dtype


def _write(saved: SavedModel, folder: Path, *, section: ExportSection, trust_remote_code: bool) -> ExportReport:
    model = load_saved_model(saved, key="export", trust_remote_code=trust_remote_code)
    processing = processing_in(saved, trust_remote_code=trust_remote_code)
    tokenizer = processing.tokenizer
    source = ModelToExport(
        model=model,
        weights=_weights(model),
        preprocessors=Preprocessors(
            None if tokenizer is None else TextPreprocessor(tokenizer, stop_ids(tokenizer), arguments_of(tokenizer)),
            processing.processor,
            read_sentence_files(saved.folder),
        ),
        section=section,
        trust_remote_code=trust_remote_code,
        adapter_folder=None if saved.adapter is None else saved.folder,
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
    return export_verified(source, folder, verify=section.verify, log=print)


def _weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def processing_in(saved: SavedModel, *, trust_remote_code: bool) -> Processing:
    """Return tokenizer and processor of the folder, else of the adapter's base, or neither.

    Raises ModelError if their files cannot be read.
    """
    reads = reads_of_head(saved.head)
    for source in dict.fromkeys((str(saved.folder), saved.base)):
        if not Path(source).is_dir() or has_processing(Path(source), reads=reads):
            try:
                return load_saved_processing(source, reads=reads, key="tokenizer", trust_remote_code=trust_remote_code)
            except ModelError as error:
                if not isinstance(error.__cause__, OSError):  # none in the local cache
                    raise
    return Processing()


_MODULES = "modules.json"
_FILES = (_MODULES, "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json")


def read_sentence_files(folder: Path) -> dict[str, Any]:
    """Return the files of the folder by relative path; none where sentence-transformers does not know the model."""
    if not (folder / _MODULES).is_file():
        return {}
    return {
        name: json.loads((folder / name).read_text(encoding="utf-8")) for name in _FILES if (folder / name).is_file()
    }


_COPIES = 1.2
"""The memory of a forward pass in float32, as a multiple of the size of the weights."""


@dataclass(frozen=True)
class ModelToExport:
    """A model with the values of its weights, and the files written next to them."""

    model: Any
    weights: Mapping[str, Tensor]  # by canonical name
    preprocessors: Preprocessors
    section: ExportSection
    facts: CardFacts
    trust_remote_code: bool
    is_quantized: bool = False
    adapter_folder: Path | None = None  # with the adapter as it is loaded, if it is in one
    load_options: Mapping[str, Any] = field(default_factory=dict)  # with which the base of an adapter is found


def export_verified(source: ModelToExport, folder: Path, *, verify: bool, log: Callable[[str], None]) -> ExportReport:
    """Write a hidden folder, verify it, and rename it to `folder`; one that a killed command left is replaced.

    Raises ExportError for a folder that does not hold the same model; its name then ends in `.failed`.
    """
    if not verify:
        return _export_to(source, folder, section=source.section)
    facts = model_facts(
        source.model,
        head=source.facts.head,
        merge=source.section.merge,
        trust_remote_code=source.trust_remote_code,
        options=source.load_options,
    )
    with (
        ExportVerifier(facts, num_threads=torch.get_num_threads()) as verifier,
        TemporaryDirectory(prefix="finetune-unmerged-") as aside,
    ):
        unmerged = source.adapter_folder if _needs_unmerged(source) else None
        if unmerged is None and _needs_unmerged(source):
            section = source.section.model_copy(update={"merge": False, "dtype": None})
            unmerged = _export_to(source, Path(aside) / "adapter", section=section).folder
        with staged_export(folder) as staged:
            report = _export_to(source, staged, section=source.section, final=folder)
            log(verifier.check(report, _expected(source, unmerged=unmerged), final=folder))
    return replace(report, folder=folder)


def _export_to(
    source: ModelToExport, folder: Path, *, section: ExportSection, final: Path | None = None
) -> ExportReport:
    return export_model(
        folder,
        model=source.model,
        weights=source.weights,
        preprocessors=source.preprocessors,
        section=section,
        facts=source.facts,
        final=final,
    )


def _needs_unmerged(source: ModelToExport) -> bool:
    """Return whether the program also compares the merge with base and adapter, to find errors that rounding hides."""
    if not (source.section.merge and has_adapter(source.model)):
        return False
    is_half = any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in source.weights.values())
    return source.is_quantized or is_half or source.section.dtype in ("bfloat16", "float16")


def _expected(source: ModelToExport, *, unmerged: Path | None) -> ExpectedOutputs:
    text, tokens = source.preprocessors.text, None
    if text is not None:
        tokenizer = text.tokenizer
        tokens = expected_tokens(tokenizer, (), renders=lambda turns: template_renders(tokenizer, turns))
    rows = _rows(source)
    logits = None
    if rows and not source.is_quantized:
        logits = logits_of(_with_values(source), rows, device=torch.device("cpu"))
    return ExpectedOutputs(rows, logits, "float32", tokens, text, unmerged)


def _rows(source: ModelToExport) -> tuple[VerificationRow, ...]:
    """Return synthetic rows; none if the model does not fit in memory, or its inputs cannot be synthesized."""
    size = sum(parameter.numel() for parameter in source.model.parameters()) * 4 * _COPIES
    inputs = source.preprocessors
    if size > available_bytes() or (inputs.text is None and inputs.processor is None):
        return ()
    start_id = getattr(unwrap_adapter(source.model).config, "decoder_start_token_id", None)
    return synthetic_rows(inputs, head=source.facts.head, start_id=start_id)


def _with_values(source: ModelToExport) -> Any:
    """Return the model in float32 with the exported values. Buffers are the model's own where none are exported."""
    model = source.model.float()
    tensors = dict(named_parameters(model)) | dict(model.named_buffers())
    for name, value in source.weights.items():
        if name in tensors and tensors[name].data_ptr() != value.data_ptr():
            tensors[name].data.copy_(value)
    return model
