"""`final/`: the model that a finished run exports and verifies, the record of the step it is from, and its upload.

The prepared model itself computes the logits that the export must reproduce, with the weights that are about to be
gathered: no copy of them stands between the training and the verification. A failed upload is a warning.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finetune.checkpoint.sharding.gather import gather_weights
from finetune.config.explain import resolved_yaml
from finetune.config.load import LoadedConfig
from finetune.config.rules.model import adapter_of
from finetune.config.run_config import RunConfig
from finetune.config.sections.export import ExportSection
from finetune.config.sections.model import ADAPTER_KEYS, ModelSection
from finetune.data.audit import Streamed
from finetune.data.batch import Batch
from finetune.data.features import Features
from finetune.data.templates.chat_template import stop_ids
from finetune.data.templates.rendering import arguments_of, render_chat
from finetune.errors import DataError, DiskError, HubError
from finetune.export.card import CardFacts, vllm_hint
from finetune.export.save import Preprocessors, TextPreprocessor, export_model, push_folder
from finetune.export.verify.rows import (
    NUM_ROWS,
    VerificationRow,
    expected_tokens,
    logits_of,
    synthetic_rows,
    verification_row,
)
from finetune.export.verify.verifier import ExpectedOutputs, ExportVerifier, Precision, model_facts, staged_export
from finetune.model.build import build_model
from finetune.model.loading.hub import is_local_path
from finetune.model.processing import Processing
from finetune.registry.model_choices import ARITHMETIC
from finetune.report.events import Noted
from finetune.report.reporter import Reporter
from finetune.run.setup.accelerator import PreparedModel
from finetune.run.setup.build import BuiltRun
from finetune.run.setup.components import make_weights
from finetune.run.setup.model_problems import is_merged
from finetune.run.setup.training_data import TrainingData
from finetune.run.state.finished import FINAL_RECORD, is_exported, read_final_record
from finetune.runtime import distributed
from finetune.runtime.environment import package_versions
from finetune.runtime.files import atomic
from finetune.runtime.parameters import InitContext
from finetune.runtime.progress import Progress
from finetune.runtime.resources import format_size, free_bytes, usable_cores
from finetune.runtime.run_folder import FINAL_FOLDER
from finetune.runtime.supervision.heartbeat import fault_point
from finetune.runtime.text.redact import redact_known
from finetune.runtime.upstream import is_offline
from finetune.task.model_inputs import decoder_input_ids, unwrap_model
from finetune.task.protocol import Task

MERGED_UNQUANTIZED = (
    "the adapter was trained on a quantized base and is merged into the unquantized one: the merged model is not "
    "exactly the model that was evaluated. Measure it with `finetune evaluate`."
)


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
    without: dict[str, Any] = {**dict.fromkeys(ADAPTER_KEYS), "quantization": None, "dtype": "float32"}
    section = config.model.model_copy(update=without)
    model = build_model(
        section,
        head=task.head,
        head_values=task.head_values,
        tokenizer=tokenizer,
        seed=config.run.seed,
        init_context=InitContext(),
    )
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def resolve_export_section(config: RunConfig) -> ExportSection:
    """Return the `export:` section; a merge into an unquantized base gets the type in which the job held it."""
    if is_merged(config) and config.model.quantization is not None and config.export.dtype is None:
        return config.export.model_copy(update={"dtype": config.model.dtype})
    return config.export


_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Trained:
    """The trained model's logits on a few rows, and the preprocessors of its inputs."""

    rows: Sequence[VerificationRow]
    logits: Sequence[Tensor] | None
    preprocessors: Preprocessors


def export_final(
    loaded: LoadedConfig,
    built: BuiltRun,
    reporter: Reporter,
    *,
    progress: Progress,
    reason: str,
    load_best: Callable[[], Progress] | None = None,
) -> None:
    """Gather the weights and write them on rank 0, unless they were written already. Collective.

    `load_best` loads the best weights into the model, and returns the progress that they had.
    An adapter's base is written only if it exists nowhere else, or where the adapter is merged into it.
    """
    folder, prepared = Path(loaded.config.run.folder), built.prepared
    is_there = distributed.is_main() and is_exported(folder, step=progress.step, section=loaded.config.export)
    if distributed.broadcast_object(is_there):
        reporter(Noted(progress.step, f"{folder / FINAL_FOLDER} already holds the model of this step"))
        return
    fault_point("export.begin", step=progress.step)
    last_step, progress = progress.step, progress if load_best is None else load_best()
    preprocessors = export_inputs(built.training_data.processing, built.training_data.task, prepared.unwrapped_model)
    with make_weights(loaded.config.train, prepared)():
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
                ended={"last_step": last_step, "reason": reason},
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
    ended: Mapping[str, Any],
    weights: dict[str, Tensor],
    trained: Trained,
) -> None:
    """Export the gathered weights, verify them and record the step they are from. Not collective: for rank 0."""
    run_folder, training_data = Path(loaded.config.run.folder), built.training_data
    final = run_folder / FINAL_FOLDER
    free, dtype = free_bytes(run_folder), loaded.config.export.dtype
    num_bytes = sum(weight.numel() * (_ITEM_BYTES[dtype] if dtype else weight.itemsize) for weight in weights.values())
    if free < num_bytes:
        raise DiskError(
            f"{final}: no space for the model: it needs {format_size(num_bytes)}, and {format_size(free)} are free. "
            "Free some space and run the same command again: it resumes from the newest checkpoint and exports the "
            "model."
        )
    (run_folder / FINAL_RECORD).unlink(missing_ok=True)
    model, head = built.prepared.unwrapped_model, training_data.task.head
    with (
        start_verifier(loaded.config, model, head=head) as verifier,
        TemporaryDirectory(dir=run_folder, prefix=".") as aside,
    ):
        weights |= load_unquantized_base(
            loaded.config, training_data.task, tokenizer=training_data.tokenizer, log=print
        )
        card = CardFacts(
            title=run_folder.name,
            task=loaded.config.task.name,
            num_steps=progress.step,
            metrics=progress.last_metrics,
            config_text=resolved_yaml(loaded),
            software=package_versions(),
            head=head,
            config_values=loaded.config.model.config_changes,
        )
        export = partial(export_model, model=model, weights=weights, preprocessors=trained.preprocessors, facts=card)
        unmerged = None
        if needs_unmerged(loaded.config):
            adapter_section = loaded.config.export.model_copy(update={"merge": False, "dtype": None})
            unmerged = export(Path(aside) / "adapter", section=adapter_section).folder
        with staged_export(final) as staged:
            report = export(staged, section=resolve_export_section(loaded.config), final=final)
            weights.clear()  # verifying needs the memory
            expected = expected_of_run(loaded.config, training_data, trained, unmerged=unmerged)
            verified = "not verified (`export.verify: false`)"
            if verifier is not None:
                verified = verifier.check(report, expected, final=final)
    sizes = {name: (final / name).stat().st_size for name in report.files}
    facts = {"step": progress.step, **ended, "export": loaded.config.export.model_dump(), "files": sizes}
    atomic.write_json(run_folder / FINAL_RECORD, facts)
    exported = f"exported {report.num_tensors} tensors, {format_size(report.size_bytes)}, to {final}"
    for text in filter(None, (exported, verified, vllm_hint(final))):
        reporter(Noted(progress.step, text))


def export_inputs(processing: Processing, task: Task, model: Any) -> Preprocessors:
    """Return the tokenizer, the processor and the task's files that are exported with the model's weights."""
    tokenizer = processing.tokenizer
    language = None if tokenizer is None else TextPreprocessor(tokenizer, stop_ids(tokenizer), arguments_of(tokenizer))
    return Preprocessors(language, processing.processor, task.export_files(model.config))


def push_final(config: RunConfig, *, log: Callable[[str], None] = print) -> None:
    """Upload `final/` once, from rank 0; log its address, or a warning why it failed. Not collective.

    The record next to `final/` keeps the outcome, and the same command retries a failed upload.
    """
    section, run = config.export, Path(config.run.folder)
    if section.push_to_hub is None or not distributed.is_main() or (record := read_final_record(run)) is None:
        return
    if record.get("pushed_to") == redact_known(section.push_to_hub):
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


_MAX_TRAINING_TEXTS = 150


def trained_logits(
    config: RunConfig, training_data: TrainingData, prepared: PreparedModel, *, preprocessors: Preprocessors
) -> tuple[tuple[VerificationRow, ...], list[Tensor] | None]:
    """Return a few held rows and the prepared model's logits on them; none of a quantized model. Collective."""
    if not config.export.verify:
        return (), None
    rows: tuple[VerificationRow, ...] = ()
    with distributed.rank_0_works_alone():
        if distributed.is_main():
            task, inner = training_data.task, unwrap_model(prepared.model)
            samples = list(islice(_samples(training_data), NUM_ROWS))
            inputs_of_rows = [
                inputs for sample in samples for inputs in _inputs(task.collate([sample]), inner, head=task.head)
            ]
            rows = tuple(verification_row(inputs, head=task.head) for inputs in inputs_of_rows[:NUM_ROWS])
            if not samples:
                start_id = getattr(inner.config, "decoder_start_token_id", None)
                rows = synthetic_rows(preprocessors, head=task.head, start_id=start_id)
    rows = distributed.broadcast_object(rows)
    if config.model.quantization is not None:
        return rows, None
    return rows, logits_of(prepared.model, rows, device=prepared.accelerator.device)


def _samples(training_data: TrainingData) -> Iterator[Features]:
    """Yield validation samples, else training samples; none of a stream, whose first ones are gone by now."""
    validation = training_data.validation_set
    if validation is not None:
        yield from (validation.intact(index) for index in range(len(validation)))
    elif not any(isinstance(source, Streamed) for source in training_data.sources.values()):
        training = training_data.training
        first = training.order.samples(0, min(_MAX_TRAINING_TEXTS, training.order.num_positions or 1))
        yield from (training.samples[int(index)] for index in np.unique(first))


def _inputs(batch: Batch, model: Any, *, head: str) -> Iterator[dict[str, Tensor]]:
    """Yield the inputs of a plain model: samples that share a row are separated."""
    if batch.cumulative_lengths is not None:
        ends = batch.cumulative_lengths.tolist()
        for start, end in pairwise(ends):
            ids = batch.inputs["input_ids"][:, start:end]
            yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return
    inputs = dict(batch.inputs)
    if head == "seq2seq_lm":
        inputs["decoder_input_ids"] = decoder_input_ids(model, batch.labels)
    yield inputs


def expected_of_run(
    config: RunConfig, training_data: TrainingData, trained: Trained, *, unmerged: Path | None
) -> ExpectedOutputs:
    """Return the logits and tokens that the export must reproduce."""
    text = trained.preprocessors.text
    tokens = None
    if text is not None:
        texts = (
            text.tokenizer.decode(sample.arrays["input_ids"].tolist())
            for sample in islice(_samples(training_data), _MAX_TRAINING_TEXTS)
            if "input_ids" in sample.arrays
        )
        tokens = expected_tokens(text.tokenizer, texts, renders=lambda turns: template_renders(text.tokenizer, turns))
    return ExpectedOutputs(trained.rows, trained.logits, computed_in(config), tokens, text, unmerged)


def template_renders(tokenizer: Any, turns: Any) -> bool:
    """Return whether the tokenizer's template renders the conversation, within the limits of templates."""
    try:
        render_chat(tokenizer, turns)
    except DataError:
        return False
    return True


def computed_in(config: RunConfig) -> Precision:
    """Return the lowest precision in which the run's forward pass computes."""
    if config.train.precision != "fp32":
        return ARITHMETIC[config.train.precision].dtype
    if config.model.dtype != "float32":
        return config.model.dtype
    is_tf32 = torch.cuda.is_available() and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if is_tf32 else "float32"


def start_verifier(config: RunConfig, model: Any, *, head: str) -> ExportVerifier | nullcontext[None]:
    """Start the process that verifies the folder; it imports libraries meanwhile. Not collective: for rank 0."""
    if not config.export.verify:
        return nullcontext()
    num_threads = usable_cores() if distributed.world() > 1 else torch.get_num_threads()
    facts = model_facts(
        model,
        head=head,
        merge=is_merged(config),
        trust_remote_code=config.model.trust_remote_code,
        options=load_options(config.model),
    )
    return ExportVerifier(facts, num_threads=num_threads)


def load_options(section: ModelSection) -> dict[str, Any]:
    """Return the options with which transformers finds the job's base model."""
    local = section.name is None or is_local_path(section.name) or is_offline()
    options = {"revision": section.revision, "cache_dir": section.cache_folder, "local_files_only": local}
    return {name: value for name, value in options.items() if value is not None}


def needs_unmerged(config: RunConfig) -> bool:
    """Return whether a merge is compared with base and adapter in float32: where run or folder have less precision."""
    if not (config.export.verify and is_merged(config)):
        return False
    dtypes = (config.model.dtype, config.export.dtype or "float32")
    return config.model.quantization is not None or computed_in(config) != "float32" or set(dtypes) != {"float32"}
