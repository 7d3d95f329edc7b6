"""The audit of the training data, and its file in the run folder."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from finetune.config.run_config import RunConfig
from finetune.data.audit import Audit, Padding, audit_sources, measure_padding
from finetune.data.encoding.labelled import LABEL
from finetune.data.features import LENGTHS_OF_SEQUENCES
from finetune.data.order.grouping import tokens_per_position
from finetune.data.template_check import check_template
from finetune.data.token_cache.store import TokenCache
from finetune.registry.tasks import TASKS
from finetune.report.reporter import RunLog
from finetune.run.setup.data import TrainingData
from finetune.runtime.files import atomic

AUDIT_FILE = "audit.json"


def audit_training_data(config: RunConfig, training_data: TrainingData) -> Audit:
    """Return the audit of the training data; of a stream, of the rows prepared by now."""
    task = TASKS[config.task.name]
    is_template_checked = task.chooses_turns and not task.has_images
    return audit_sources(
        training_data.sources,
        validation=training_data.validation_set,
        limits=config.data.audit,
        padding=_padding(config, training_data),
        template=check_template(training_data.tokenizer, config.data) if is_template_checked else None,
        classes=_classes(training_data) if task.sample == "image" else None,
        num_sequences=_num_sequences(training_data) if "pairs" in task.formats else 0,
    )


def write_audit(folder: Path, config: RunConfig, training_data: TrainingData, *, log: RunLog) -> None:
    """Write the audit into the run folder and log the problems that show only across sources."""
    audit = audit_training_data(config, training_data)
    atomic.write_json(folder / AUDIT_FILE, audit.as_json())
    for line in _notices(audit):
        log(line)


def _padding(config: RunConfig, training_data: TrainingData) -> Padding | None:
    if training_data.training.order.num_positions is None:
        return None  # the samples of a stream have not been read yet
    if not TASKS[config.task.name].has_tokens:
        return None
    batching, train = config.data.batching, config.train
    budget = tokens_per_position(batching, max_length=config.data.longest)
    return measure_padding(
        training_data.training,
        training_data.task.collate,
        global_batch_size=train.global_batch_size,
        microbatch_size=train.known_microbatch_size,
        budget=None if batching.by == "samples" else budget,
    )


def _classes(training_data: TrainingData) -> dict[str, int]:
    """Return the training images of each class; streams have not been read yet and are left out."""
    names = list(training_data.task.data_facts.values["labels"])
    prepared = [rows for rows in training_data.sources.values() if isinstance(rows, TokenCache)]
    labels = (piece for rows in prepared for piece in rows.pieces(LABEL))
    counts = sum((np.bincount(piece, minlength=len(names)) for piece in labels), np.zeros(len(names)))
    return {name: int(count) for name, count in zip(names, counts, strict=True)}


def _num_sequences(training_data: TrainingData) -> int:
    """Return the texts of all training samples; streams have not been read yet and are left out."""
    prepared = [rows for rows in training_data.sources.values() if isinstance(rows, TokenCache)]
    return sum(len(piece) for rows in prepared for piece in rows.pieces(LENGTHS_OF_SEQUENCES))


def _notices(audit: Audit) -> Iterator[str]:
    if audit.padding is not None and audit.padding.share > 0:
        share, plain = audit.padding.share, audit.padding.plain_share
        yield f"padding: {share:.1%} of the computed positions (plain batches: {plain:.1%})"
    if audit.total.duplicates:
        yield f"{audit.total.duplicates:,} of {audit.total.counts.samples:,} training samples are duplicates"
    for source in audit.sources:
        if source.in_validation:
            yield (
                f"warning: {source.key}: {source.in_validation:,} samples are among the validation samples, too. "
                "`data.validation.exclude_from_train: true` leaves such rows out."
            )
    if audit.template is not None:
        if audit.template.trained_cases and not audit.template.trains_on_end:
            yield "warning: chat template: the end-of-turn token is not a target, so the model will not learn to stop"
        for difference in audit.template.differences[:1]:  # the other cases differ in the same way
            yield (
                f"warning: chat template: {difference.case}: the prompt at inference is {difference.prompt}, but the "
                f"model is trained on {difference.trained}"
            )
