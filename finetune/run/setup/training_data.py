"""The training data of a run: tokenizer, task and tokenized samples, made without any process group."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from finetune.config.load import LoadedConfig
from finetune.config.rules.train import step_problems
from finetune.config.run_config import RunConfig
from finetune.config.section import KeyLocations
from finetune.config.sections.data import DataSection
from finetune.data.audit import Audit, Streamed, audit_sources, measure_padding, refuse_exceeded
from finetune.data.encoding.labelled import LABEL
from finetune.data.encoding.tokenizer import prepare_tokenizer, tokenizer_identity, unknown_ids
from finetune.data.features import LENGTHS_OF_SEQUENCES, Features
from finetune.data.order.mixing import mixed_view
from finetune.data.order.order import DatasetView, fingerprint_of, steps_for_tokens, token_budget
from finetune.data.sources.source import open_sources, rows_read, stream_of, texts
from finetune.data.streams.stream import stream_view
from finetune.data.template_check import check_template
from finetune.data.token_cache.cache import OnSourceProgress, cache_folder, prepare_set
from finetune.data.token_cache.chunks import Encoding
from finetune.data.token_cache.store import TokenCache, dataset_view, grouped_by_length
from finetune.model.processing import Processing, load_processing
from finetune.registry.plugins import code_identity
from finetune.registry.tasks import TASKS
from finetune.report.reporter import RunLog
from finetune.run.context import RunContext
from finetune.run.setup.model_problems import format_padding_free, resolve_padding_free
from finetune.runtime import distributed
from finetune.runtime.files import atomic
from finetune.runtime.seeds import derive_seed
from finetune.task.generation import Metric, resolve_metrics
from finetune.task.lm_loss.target_loss import resolve_kernel
from finetune.task.protocol import Task, TaskContext, build_task
from finetune.train.plan import StepPlan, make_step_plan


@dataclass(frozen=True)
class TrainingData:
    """The training data, the same on every rank."""

    processing: Processing
    task: Task
    training: DatasetView
    sources: Mapping[str, TokenCache | Streamed]  # the pool's sources by key in the job YAML: for the audit
    validation_set: TokenCache | None
    answer_metrics: dict[str, Metric]

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer; None where there are only images."""
        return self.processing.tokenizer

    def sample_at(self, position: int) -> Features:
        """Return the first sample at the position: of a stream, one that is needed soon."""
        return self.training.samples[int(self.training.order.samples(position, position + 1)[0])]


@dataclass(frozen=True)
class PreparedData:
    """The result of `prepare_data`: the training data, and the plan of the steps over it."""

    training_data: TrainingData
    plan: StepPlan


def prepare_data(context: RunContext) -> PreparedData:
    """Return the training data and the plan, made without any process group."""
    training_data = make_training_data(context.config, context.log, locations=context.loaded.sources)
    expected = context.strategy.expected
    size = expected.num_processes // expected.data_parallel_size
    return PreparedData(training_data, make_run_plan(context.loaded, training_data, sequence_size=size))


def make_training_data(
    config: RunConfig,
    log: RunLog,
    *,
    on_progress: OnSourceProgress | None = None,
    locations: KeyLocations = MappingProxyType({}),
    builds: bool = True,
) -> TrainingData:
    """Return the training data; one process tokenizes, the others wait on a file. NotPrepared without `builds`.

    Raises DataError where the audit exceeds its limits.
    """
    data = config.data
    generate = config.evaluate.generate if config.evaluate else None
    answer_metrics = resolve_metrics(generate.metrics if generate else ())
    sources = open_sources(data, seed=config.run.seed, log=log)
    processing = load_processing(
        config.model,
        reads=TASKS[config.task.name].reads,
        texts=partial(texts, sources.train),
        cache_folder=cache_folder(data),
        log=log,
        images=data.images,
    )
    if processing.tokenizer is not None:
        prepare_tokenizer(processing.tokenizer, data, locations=locations, log=log)
    kernel, warnings = resolve_kernel(config.train.loss_kernel)
    layout = resolve_padding_free(config)
    rows = partial(rows_read, sources.train)
    task = build_task(
        TaskContext(config.task, layout, processing.tokenizer, processing.processor, rows=rows, loss_kernel=kernel)
    )
    for line in (*warnings, *task.data_facts.lines, *format_padding_free(config, layout)):
        log(line)
    encoding = make_encoding(data, processing, task, name=config.task.name)
    prepare = partial(prepare_set, encoding=encoding, log=log, on_progress=on_progress, builds=builds)
    audited: dict[str, TokenCache | Streamed] = {}
    views = []
    for source in sources.train:
        own_seed = derive_seed(config.run.seed, source.key) if layout.train.mix else config.run.seed
        if stream_of(source.section) is not None:
            view, audited[source.key] = stream_view(source, encoding, seed=own_seed, log=log)
        else:
            audited[source.key] = prepared = prepare(source)
            view = dataset_view(prepared, layout, seed=own_seed, key=source.key)
        views.append(view)
    refuse_exceeded(audited, layout.audit)
    return TrainingData(
        processing,
        task,
        _in_training_order(views, layout, config),
        audited,
        prepare(sources.validation) if sources.validation else None,
        answer_metrics,
    )


def _in_training_order(views: Sequence[DatasetView], layout: DataSection, config: RunConfig) -> DatasetView:
    """Return the views of all sources as one, mixed and grouped by length as the job says."""
    seed, mixed = config.run.seed, views[0]
    if layout.train.mix:
        mixed = mixed_view(views, layout.train, seed=seed, unit=layout.batching.unit)
    return grouped_by_length(mixed, layout.batching, seed=seed, global_batch_size=config.train.global_batch_size)


def make_encoding(data: DataSection, processing: Processing, task: Task, *, name: str) -> Encoding:
    """Return how the rows of every source of the job are encoded by the task of this name."""
    tokenizer, code = processing.tokenizer, code_identity(TASKS[name])
    identity = {"task name": name, **input_identity(processing, task)}
    return Encoding(
        task.samples.encode,
        data,
        identity=identity | ({"task code": " ".join(code)} if code else {}),
        unknown_ids=unknown_ids(tokenizer) if tokenizer is not None else frozenset(),
        length=task.samples.length_limit,
        over_length=TASKS[name].over_length,
    )


def input_identity(processing: Processing, task: Task) -> dict[str, str]:
    """Return what decides how a row is encoded besides `data:`, by name: part of a token cache's key."""
    identity = dict(processing.identity)
    if processing.tokenizer is not None:
        identity |= tokenizer_identity(processing.tokenizer)
    if task.samples.identity:
        identity["task"] = fingerprint_of(json.dumps(task.samples.identity, sort_keys=True))
    return identity


def make_run_plan(loaded: LoadedConfig, training_data: TrainingData, *, sequence_size: int = 1) -> StepPlan:
    """Return the number of steps and the shape of each, and the lines to log about the data that they see.

    `sequence_size` ranks share each microbatch. Raises ConfigError for keys whose numbers of steps do not fit the plan.
    """
    config, training = loaded.config, training_data.training
    batch = config.train.global_batch_size
    plan = make_step_plan(
        config.train,
        num_positions=training.order.num_positions,
        unit=config.data.batching.unit,
        world=distributed.world(),
        steps_for_tokens=lambda tokens: steps_for_tokens(
            training.order,
            training.samples.lengths_of,
            epoch_tokens=training.epoch_tokens,
            global_batch_size=batch,
            tokens=tokens,
        ),
        sequence_size=sequence_size,
    )
    loaded.refuse(step_problems(config, num_steps=plan.num_steps))
    return replace(plan, arithmetic=(*plan.arithmetic, *training.lines(plan.num_steps * batch)))


AUDIT_FILE = "audit.json"


def audit_training_data(config: RunConfig, training_data: TrainingData) -> Audit:
    """Return the audit of the training data; of a stream, of the rows prepared by now."""
    task, data, training = TASKS[config.task.name], config.data, training_data.training
    padding, classes, num_sequences = None, None, 0
    if task.has_tokens and training.order.num_positions is not None:  # a stream's samples have not been read yet
        budget = token_budget(data.batching, max_length=data.longest)
        padding = measure_padding(
            training,
            training_data.task.collate,
            global_batch_size=config.train.global_batch_size,
            microbatch_size=config.train.known_microbatch_size,
            budget=None if data.batching.by == "samples" else budget,
        )
    prepared = [rows for rows in training_data.sources.values() if isinstance(rows, TokenCache)]
    if task.sample == "image":
        names = list(training_data.task.data_facts.values["labels"])
        labels = (piece for rows in prepared for piece in rows.stored.pieces(LABEL))
        counts = sum((np.bincount(piece, minlength=len(names)) for piece in labels), np.zeros(len(names)))
        classes = {name: int(count) for name, count in zip(names, counts, strict=True)}
    if "pairs" in task.formats:
        num_sequences = sum(len(piece) for rows in prepared for piece in rows.stored.pieces(LENGTHS_OF_SEQUENCES))
    is_template_checked = task.chooses_turns and not task.has_images
    return audit_sources(
        training_data.sources,
        validation=training_data.validation_set,
        limits=data.audit,
        padding=padding,
        template=check_template(training_data.tokenizer, data) if is_template_checked else None,
        classes=classes,
        num_sequences=num_sequences,
    )


def write_audit(folder: Path, config: RunConfig, training_data: TrainingData, *, log: RunLog) -> None:
    """Write the audit into the run folder and log the problems that show only across sources."""
    audit = audit_training_data(config, training_data)
    atomic.write_json(folder / AUDIT_FILE, audit.as_json())
    if audit.padding is not None and audit.padding.share > 0:
        share, plain = audit.padding.share, audit.padding.plain_share
        log(f"padding: {share:.1%} of the computed positions (plain batches: {plain:.1%})")
    if audit.total.duplicates:
        log(f"{audit.total.duplicates:,} of {audit.total.counts.samples:,} training samples are duplicates")
    for source in audit.sources:
        if source.in_validation:
            log(
                f"warning: {source.key}: {source.in_validation:,} samples are among the validation samples, too. "
                "`data.validation.exclude_from_train: true` leaves such rows out."
            )
    if audit.template is not None:
        if audit.template.default_system:
            log(f"chat template: {audit.template.default_system_line()}")
        if audit.template.trained_cases and not audit.template.trains_on_end:
            log("warning: chat template: the end-of-turn token is not a target, so the model will not learn to stop")
        for difference in audit.template.differences[:1]:  # the other cases differ in the same way
            log(
                f"warning: chat template: {difference.case}: the prompt at inference is {difference.prompt}, but the "
                f"model is trained on {difference.trained}"
            )
