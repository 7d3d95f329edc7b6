"""The training data of a run: tokenizer, task and tokenized samples, made without any process group."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from finetune.config.run_config import RunConfig
from finetune.config.section import KeyLocations
from finetune.config.sections.data import DataSection
from finetune.data.audit import Prepared, Streamed, refuse_exceeded
from finetune.data.encoding.tokenizer import drops_unknown_text, tokenizer_identity, unknown_ids
from finetune.data.features import Features
from finetune.data.order.mixing import mixed_view
from finetune.data.order.order import DatasetView, fingerprint_of, steps_for_tokens
from finetune.data.sources.source import OpenedSources, open_sources, rows_read, stream_of, texts
from finetune.data.streams.stream import stream_view
from finetune.data.templates.arguments import arguments_of, use_arguments
from finetune.data.templates.chat_template import set_chat_template
from finetune.data.token_cache.cache import OnSourceProgress, cache_folder, prepare_set, repair
from finetune.data.token_cache.chunks import Encoding
from finetune.data.token_cache.store import TokenCache, dataset_view, grouped_by_length
from finetune.model.processing import Processing, load_processing
from finetune.registry.plugins import code_identity
from finetune.registry.tasks import TASKS
from finetune.report.reporter import RunLog
from finetune.run.context import RunContext
from finetune.run.setup.padding_free import format_padding_free, resolve_padding_free
from finetune.runtime import distributed
from finetune.runtime.seeds import derive_seed
from finetune.task.generation import Metric, load_metrics
from finetune.task.lm_loss.target_loss import resolve_kernel
from finetune.task.protocol import Task, TaskContext, build_task
from finetune.train.plan import StepPlan, make_plan

_DROPS_UNKNOWN_TEXT = (
    "warning: the tokenizer has neither an unknown token nor bytes: characters that it does not know are "
    "dropped silently. Look at `finetune preview`, or choose another tokenizer."
)

_TEMPLATE_ARGUMENTS = (
    "the tokenizer comes with chat template arguments, which are used: {}. `data.chat_template_arguments` replaces "
    "them."
)


@dataclass(frozen=True)
class TrainingData:
    """The training data, the same on every rank."""

    processing: Processing
    task: Task
    training: DatasetView
    sources: Mapping[str, Prepared | Streamed]  # the pool's sources by key in the job YAML: for the audit
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
    """What `prepare_data` returns: the training data, and the plan of the steps over it."""

    training_data: TrainingData
    plan: StepPlan


def prepare_data(context: RunContext) -> PreparedData:
    """Return the training data and the plan, made without any process group."""
    training_data = make_training_data(context.config, context.log, locations=context.loaded.sources)
    expected = context.strategy.expected()
    size = expected.num_processes // expected.data_parallel_size
    return PreparedData(training_data, make_run_plan(context.config, training_data, sequence_size=size))


def make_training_data(
    config: RunConfig,
    log: RunLog,
    *,
    on_progress: OnSourceProgress | None = None,
    locations: KeyLocations = MappingProxyType({}),
    builds: bool = True,
) -> TrainingData:
    """Return the training data; one process tokenizes, the others wait on a file. NotPrepared without `builds`."""
    data = config.data
    generate = config.evaluate.generate if config.evaluate else None
    answer_metrics = load_metrics(generate.metrics if generate else ())
    sources = open_sources(data, seed=config.run.seed, log=log)
    processing = _load_processing(config, sources, log, locations)
    rows = partial(rows_read, sources.train)
    kernel, warnings = resolve_kernel(config.train.loss_kernel)
    layout = resolve_padding_free(config)
    task = build_task(
        TaskContext(config.task, layout, processing.tokenizer, processing.processor, rows=rows, loss_kernel=kernel)
    )
    for line in (*warnings, *task.data_facts.lines, *format_padding_free(config, layout)):
        log(line)
    encoding = make_encoding(data, processing, task, name=config.task.name)
    prepare = partial(prepare_set, encoding=encoding, log=log, on_progress=on_progress, builds=builds)
    audited: dict[str, Prepared | Streamed] = {}
    pools = []
    for source in sources.train:
        seed = derive_seed(config.run.seed, source.key) if data.train.mix else config.run.seed
        if stream_of(source.section) is not None:
            pool, audited[source.key] = stream_view(source, encoding, seed=seed, log=log)
        else:
            audited[source.key] = prepared = prepare(source)
            pool = dataset_view(prepared, data, seed=seed, key=source.key)
        pools.append(pool)
    refuse_exceeded(audited, data.audit)
    validation_set = prepare(sources.validation) if sources.validation else None
    return TrainingData(processing, task, _mix(pools, config, layout), audited, validation_set, answer_metrics)


def make_encoding(data: DataSection, processing: Processing, task: Task, *, name: str) -> Encoding:
    """Return how the rows of every source of the job are encoded by the task of this name."""
    tokenizer, code = processing.tokenizer, code_identity(TASKS[name])
    return Encoding(
        task.samples.encode,
        data,
        identity=input_identity(processing, task) | ({"task code": " ".join(code)} if code else {}),
        unknown_ids=unknown_ids(tokenizer) if tokenizer is not None else frozenset(),
        length=task.samples.length_limit,
    )


def input_identity(processing: Processing, task: Task) -> dict[str, str]:
    """Return what decides how a row is encoded besides `data:`, by name: part of a token cache's key."""
    identity = dict(processing.identity)
    if processing.tokenizer is not None:
        identity |= tokenizer_identity(processing.tokenizer)
    if task.samples.identity:
        identity["task"] = fingerprint_of(json.dumps(task.samples.identity, sort_keys=True))
    return identity


def _load_processing(config: RunConfig, sources: OpenedSources, log: RunLog, locations: KeyLocations) -> Processing:
    """Return the tokenizer or processor, with the chat template set."""
    processing = load_processing(
        config.model,
        reads=TASKS[config.task.name].reads,
        texts=partial(texts, sources.train),
        cache_folder=cache_folder(config.data),
        log=log,
        images=config.data.images,
    )
    if processing.tokenizer is not None:
        set_chat_template(processing.tokenizer, config.data.chat_template)
        use_arguments(processing.tokenizer, config.data.chat_template_arguments, locations)
        if config.data.chat_template_arguments is None and (brought := arguments_of(processing.tokenizer)):
            log(_TEMPLATE_ARGUMENTS.format(json.dumps(dict(brought))))
        if drops_unknown_text(processing.tokenizer):
            log(_DROPS_UNKNOWN_TEXT)
    return processing


def _mix(pools: Sequence[DatasetView], config: RunConfig, data: DataSection) -> DatasetView:
    """Return the views mixed, and sorted by length, as configured; `data` is its resolved section."""
    seed = config.run.seed
    pool = mixed_view(pools, data.train, seed=seed, unit=data.batching.unit) if data.train.mix else pools[0]
    return grouped_by_length(pool, data.batching, seed=seed, global_batch_size=config.train.global_batch_size)


def make_run_plan(config: RunConfig, training_data: TrainingData, *, sequence_size: int = 1) -> StepPlan:
    """Return the number of steps and the shape of each, and the lines to log about the data that they see.

    `sequence_size` ranks share each microbatch.
    """
    training, batch = training_data.training, config.train.global_batch_size
    plan = make_plan(
        config.train,
        num_positions=training.order.num_positions,
        unit=config.data.batching.unit,
        world=distributed.world(),
        steps_for_tokens=partial(_steps_for_tokens, training, batch),
        sequence_size=sequence_size,
    )
    return replace(plan, arithmetic=(*plan.arithmetic, *training.lines(plan.num_steps * batch)))


def _steps_for_tokens(training: DatasetView, global_batch_size: int, tokens: int) -> int:
    return steps_for_tokens(
        training.order,
        training.samples.lengths_of,
        epoch_tokens=training.epoch_tokens,
        global_batch_size=global_batch_size,
        tokens=tokens,
    )


VERIFY_TIMEOUT_SECONDS = 10.0
"""For a large set; each sample is also verified before a step trains on it."""


def verify_before_training(training_data: TrainingData) -> None:
    """Rebuild sets in which damage was detected. Not collective: each rank checks what it reads.

    Where something is precomputed for all samples, all of them are verified first.
    """
    verify_sets(training_data, seconds=VERIFY_TIMEOUT_SECONDS if training_data.task.precomputed is None else None)


def verify_sets(training_data: TrainingData, *, seconds: float | None = None) -> None:
    """Wait until all sets are verified, at most `seconds` for each; damaged ones are rebuilt."""
    for prepared in (*training_data.sources.values(), training_data.validation_set):
        if isinstance(prepared, TokenCache):
            repair(prepared, seconds=seconds)
