"""Records of the model that a run exports: its logits on a few held rows, and its tokens, for `export.verify`.

The prepared model itself computes the logits, with the weights that are about to be gathered: no copy of them stands
between the training and the verification.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finetune.config.rules.model import adapter_of
from finetune.config.run_config import RunConfig
from finetune.config.sections.model import ModelSection
from finetune.data.audit import Streamed
from finetune.data.batch import Batch
from finetune.data.features import Features
from finetune.data.templates.rendering import render
from finetune.errors import DataError
from finetune.export.save import Preprocessors
from finetune.export.verify.rows import (
    NUM_ROWS,
    VerificationRow,
    expected_tokens,
    logits_of,
    synthetic_rows,
    verification_row,
)
from finetune.export.verify.verifier import Expected, ExportVerifier, ModelFacts, Precision, model_facts
from finetune.model.loading.hub import is_local_path
from finetune.registry.model import ARITHMETIC
from finetune.run.setup.data import TrainingData
from finetune.run.setup.prepared_model import PreparedModel
from finetune.runtime import distributed
from finetune.runtime.hub import is_offline
from finetune.runtime.resources import usable_cores
from finetune.task.model_inputs import decoder_input_ids, unwrap_model

_MAX_TRAINING_TEXTS = 150


def trained_logits(
    config: RunConfig, training_data: TrainingData, prepared: PreparedModel, *, preprocessors: Preprocessors
) -> tuple[tuple[VerificationRow, ...], list[Tensor] | None]:
    """Return a few held rows and the prepared model's logits on them; none of a quantized model. Collective."""
    if not config.export.verify:
        return (), None
    with distributed.rank_0_works_alone():
        rows = _held_rows(training_data, prepared, preprocessors=preprocessors) if distributed.is_main() else ()
    rows = distributed.broadcast_object(rows)
    if config.model.quantization is not None:
        return rows, None
    return rows, logits_of(prepared.model, rows, device=prepared.accelerator.device)


def _held_rows(
    training_data: TrainingData, prepared: PreparedModel, *, preprocessors: Preprocessors
) -> tuple[VerificationRow, ...]:
    task, inner = training_data.task, unwrap_model(prepared.model)
    samples = list(islice(_samples(training_data), NUM_ROWS))
    if not samples:
        start_id = getattr(inner.config, "decoder_start_token_id", None)
        return synthetic_rows(preprocessors, head=task.head, start_id=start_id)
    inputs_of_rows = [inputs for sample in samples for inputs in _inputs(task.collate([sample]), inner, head=task.head)]
    return tuple(verification_row(inputs, head=task.head) for inputs in inputs_of_rows[:NUM_ROWS])


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


@dataclass(frozen=True)
class Trained:
    """The trained model's logits on a few rows, and the preprocessors of its inputs."""

    rows: Sequence[VerificationRow]
    logits: Sequence[Tensor] | None
    preprocessors: Preprocessors


def expected_of_run(
    config: RunConfig, training_data: TrainingData, trained: Trained, *, unmerged: Path | None
) -> Expected:
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
    return Expected(trained.rows, trained.logits, computed_in(config), tokens, text, unmerged)


def template_renders(tokenizer: Any, turns: Any) -> bool:
    """Return whether the tokenizer's template renders the conversation, within the limits of templates."""
    try:
        render(tokenizer, turns)
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


@dataclass(frozen=True)
class NoVerifier:
    """Verifies nothing: `export.verify: false`."""

    def __enter__(self) -> "NoVerifier":
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def check(self, report: object, expected: object, *, final: object = None) -> str:
        """Return that nothing was verified."""
        return "not verified (`export.verify: false`)"


def start_verifier(config: RunConfig, model: Any, *, head: str) -> ExportVerifier | NoVerifier:
    """Start the process that verifies the folder; it imports libraries meanwhile. Not collective: for rank 0."""
    if not config.export.verify:
        return NoVerifier()
    num_threads = usable_cores() if distributed.world() > 1 else torch.get_num_threads()
    return ExportVerifier(facts_of(config, model, head=head), num_threads=num_threads)


def facts_of(config: RunConfig, model: Any, *, head: str) -> ModelFacts:
    """Return the facts of the job's model that are needed to load its export."""
    merge = config.export.merge and adapter_of(config) is not None
    trusts = config.model.trust_remote_code
    return model_facts(model, head=head, merge=merge, trust_remote_code=trusts, options=load_options(config.model))


def load_options(section: ModelSection) -> dict[str, Any]:
    """Return the options with which transformers finds the job's base model."""
    local = section.name is None or is_local_path(section.name) or is_offline()
    options = {"revision": section.revision, "cache_dir": section.cache_folder, "local_files_only": local}
    return {name: value for name, value in options.items() if value is not None}


def needs_unmerged(config: RunConfig) -> bool:
    """Return whether a merge is compared with base and adapter in float32: where run or folder have less precision."""
    if not (config.export.verify and config.export.merge and adapter_of(config) is not None):
        return False
    dtypes = (config.model.dtype, config.export.dtype or "float32")
    return config.model.quantization is not None or computed_in(config) != "float32" or set(dtypes) != {"float32"}
