"""`final/`: the model that a finished run exports, the record of the step it is from, and its upload to the hub.

A failed upload is a warning: it fails no training.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from torch import Tensor

from finetune.checkpoint.sharding.gather import gather_weights
from finetune.config.explain import resolved_yaml
from finetune.config.load import LoadedConfig
from finetune.config.rules.model import ADAPTERS, adapter_of
from finetune.config.run_config import RunConfig
from finetune.config.sections.export import ExportSection
from finetune.data.templates.arguments import arguments_of
from finetune.data.templates.chat_template import stop_ids
from finetune.errors import DiskError, HubError, ModelError
from finetune.export.card import CardFacts, vllm_hint
from finetune.export.save import ExportReport, Preprocessors, TextPreprocessor, export_model, push_folder
from finetune.export.verify.verifier import staged_export
from finetune.model.processing import Processing
from finetune.report.events import Noted
from finetune.report.reporter import Reporter
from finetune.run.context import RunPaths
from finetune.run.export_verification import Trained, expected_of_run, needs_unmerged, start_verifier, trained_logits
from finetune.run.setup.model import build_model
from finetune.run.setup.prepared_model import BuiltRun, make_weights
from finetune.run.state.finished import FINAL_RECORD, input_stamps, is_exported, read_record
from finetune.runtime import distributed
from finetune.runtime.environment import package_versions
from finetune.runtime.files import atomic
from finetune.runtime.parameters import InitContext
from finetune.runtime.progress import Progress
from finetune.runtime.resources import format_size, free_bytes
from finetune.runtime.run_folder import FINAL_FOLDER
from finetune.runtime.supervision.heartbeat import fault_point
from finetune.runtime.text.redact import redacted_text
from finetune.task.protocol import Task

MERGED_UNQUANTIZED = (
    "the adapter was trained on a quantized base and is merged into the unquantized one: the merged model is not "
    "exactly the model that was evaluated. Measure it with `finetune evaluate`."
)


def is_merged(config: RunConfig) -> bool:
    """Return whether the export is a whole model that an adapter is merged into."""
    return config.export.merge and adapter_of(config) is not None


def exports_trained_only(config: RunConfig) -> bool:
    """Return whether the export needs only the trained weights: the base exists elsewhere, or is loaded again."""
    is_elsewhere = adapter_of(config) is not None and config.model.name is not None
    return is_elsewhere and (not is_merged(config) or config.model.quantization is not None)


def load_unquantized_base(
    config: RunConfig, task: Task, *, tokenizer: Any, log: Callable[[str], None]
) -> dict[str, Tensor]:
    """Return the weights of the unquantized base in float32 on the CPU, where a merge needs them; else nothing.

    Not collective: for rank 0.
    """
    if not is_merged(config) or config.model.quantization is None:
        return {}
    log(MERGED_UNQUANTIZED)
    without: dict[str, Any] = {**dict.fromkeys(ADAPTERS), "quantization": None, "dtype": "float32"}
    section = config.model.model_copy(update=without)
    bare = config.model_copy(update={"model": section})
    model = build_model(bare, task=task, tokenizer=tokenizer, init_context=InitContext())
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def require_mergeable(config: RunConfig, *, strategy: str | None = None) -> None:
    """Raise ModelError where a merge at the end would be wrong, or impossible under the launched strategy."""
    section = config.model
    if not is_merged(config) or section.quantization is None:
        return
    if section.lora is not None and section.lora.init == "loftq":
        raise ModelError(
            "export.merge: an adapter of `init: loftq` corrects the quantization error of its base, so it must not be "
            "merged into the unquantized base. Leave `merge` out, or write another `model.lora.init`."
        )
    if strategy == "zero3":
        raise ModelError(
            "export.merge: under ZeRO-3 the unquantized base cannot be loaded on one process. Leave `merge` out, and "
            "run `finetune export RUN --merge` afterwards."
        )


def resolve_export_section(config: RunConfig) -> ExportSection:
    """Return the `export:` section; a merge into an unquantized base gets the type in which the job held it."""
    if is_merged(config) and config.model.quantization is not None and config.export.dtype is None:
        return config.export.model_copy(update={"dtype": config.model.dtype})
    return config.export


_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def export_final(loaded: LoadedConfig, built: BuiltRun, reporter: Reporter, *, progress: Progress, reason: str) -> None:
    """Gather the weights and write them on rank 0, unless they were written already. Collective.

    An adapter's base is written only where it exists nowhere else, or where the adapter is merged into it.
    """
    paths, prepared = RunPaths(Path(loaded.config.run.folder)), built.prepared
    is_there = distributed.is_main() and is_exported(paths.folder, step=progress.step, section=loaded.config.export)
    if distributed.broadcast_object(is_there):
        reporter(Noted(progress.step, f"{paths.final} already holds the model of this step"))
        return
    fault_point("export.begin", step=progress.step)
    preprocessors = export_inputs(built.training_data.processing, built.training_data.task, prepared.unwrapped_model)
    with make_weights(loaded.config.train, prepared).swapped_in():
        rows, logits = trained_logits(loaded.config, built.training_data, prepared, preprocessors=preprocessors)
        weights = gather_weights(prepared.accelerator, prepared.model, trained_only=exports_trained_only(loaded.config))
    with distributed.rank_0_works_alone():
        fault_point("export.write", step=progress.step)
        if distributed.is_main():
            _write_final(
                loaded,
                built,
                reporter,
                progress=progress,
                reason=reason,
                weights=weights,
                trained=Trained(rows, logits, preprocessors),
            )
    fault_point("export.done", step=progress.step)


def _write_final(
    loaded: LoadedConfig,
    built: BuiltRun,
    reporter: Reporter,
    *,
    progress: Progress,
    reason: str,
    weights: dict[str, Tensor],
    trained: Trained,
) -> None:
    """Export the gathered weights, verify them and record the step they are from. Not collective: for rank 0."""
    run_folder, training_data = Path(loaded.config.run.folder), built.training_data
    final = RunPaths(run_folder).final
    _require_disk_space(run_folder, weights.values(), dtype=loaded.config.export.dtype)
    (run_folder / FINAL_RECORD).unlink(missing_ok=True)
    model, head = built.prepared.unwrapped_model, training_data.task.head
    with (
        start_verifier(loaded.config, model, head=head) as verifier,
        TemporaryDirectory(dir=run_folder, prefix=".") as aside,
    ):
        weights |= load_unquantized_base(
            loaded.config, training_data.task, tokenizer=training_data.tokenizer, log=print
        )
        export = partial(
            export_model,
            model=model,
            weights=weights,
            preprocessors=trained.preprocessors,
            facts=_card(loaded, progress, head=head),
        )
        unmerged = None
        if needs_unmerged(loaded.config):
            adapter_section = loaded.config.export.model_copy(update={"merge": False, "dtype": None})
            unmerged = export(Path(aside) / "adapter", section=adapter_section).folder
        with staged_export(final) as staged:
            report = export(staged, section=resolve_export_section(loaded.config), final=final)
            weights.clear()  # verifying needs the memory
            expected = expected_of_run(loaded.config, training_data, trained, unmerged=unmerged)
            verified = verifier.check(report, expected, final=final)
    report = replace(report, folder=final)
    _record(loaded.config, report, step=progress.step, reason=reason)
    exported = f"exported {report.num_tensors} tensors, {format_size(report.size_bytes)}, to {final}"
    for text in filter(None, (exported, verified, vllm_hint(final))):
        reporter(Noted(progress.step, text))


def _require_disk_space(run_folder: Path, weights: Iterable[Tensor], *, dtype: str | None) -> None:
    """Raise DiskError where the disk has no space for the weights in this type, next to an existing `final/`."""
    free = free_bytes(run_folder)
    num_bytes = sum(weight.numel() * (_ITEM_BYTES[dtype] if dtype else weight.itemsize) for weight in weights)
    if free < num_bytes:
        raise DiskError(
            f"{run_folder / FINAL_FOLDER}: no space for the model: it needs {format_size(num_bytes)}, and "
            f"{format_size(free)} are free. Free some space and run the same command again: it resumes from the newest "
            "checkpoint and exports the model."
        )


def export_inputs(processing: Processing, task: Task, model: Any) -> Preprocessors:
    """Return the tokenizer, the processor and the task's files that are exported with the model's weights."""
    tokenizer = processing.tokenizer
    language = None if tokenizer is None else TextPreprocessor(tokenizer, stop_ids(tokenizer), arguments_of(tokenizer))
    return Preprocessors(language, processing.processor, task.export_files(model.config))


def _card(loaded: LoadedConfig, progress: Progress, *, head: str) -> CardFacts:
    return CardFacts(
        title=Path(loaded.config.run.folder).name,
        task=loaded.config.task.name,
        num_steps=progress.step,
        metrics=progress.last_metrics,
        config_text=resolved_yaml(loaded),
        software=package_versions(),
        head=head,
        config_values=loaded.config.model.config_changes,
    )


def _record(config: RunConfig, report: ExportReport, *, step: int, reason: str) -> None:
    sizes = {name: (report.folder / name).stat().st_size for name in report.files}
    facts = {"step": step, "reason": reason, "export": config.export.model_dump(), "files": sizes}
    facts |= {"inputs": input_stamps(config, before=psutil.Process().create_time())}
    atomic.write_json(Path(config.run.folder) / FINAL_RECORD, facts)


def push_final(config: RunConfig, *, log: Callable[[str], None] = print) -> None:
    """Upload `final/` once, from rank 0; log its address, or a warning why it failed. Not collective.

    The record next to `final/` keeps the outcome, and the same command retries a failed upload.
    """
    section, run = config.export, Path(config.run.folder)
    if section.push_to_hub is None or not distributed.is_main() or (record := read_record(run)) is None:
        return
    if record.get("pushed_to") == redacted_text(section.push_to_hub):
        return
    try:
        address = push_folder(run / FINAL_FOLDER, section.push_to_hub, private=section.private)
    except HubError as error:
        log(f"warning: export.push_to_hub: {error}")
        record |= {"pushed_to": None, "push_problem": str(error)}
    else:
        log(f"uploaded to {address}")
        record |= {"pushed_to": section.push_to_hub, "push_problem": None}
    atomic.write_json(run / FINAL_RECORD, record)
