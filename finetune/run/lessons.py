"""What there is to learn: tokenizer, task and tokenised rows, made without any process group."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from finetune.config.run_config import RunConfig
from finetune.data.audit.audit import Prepared, Streamed, refuse_exceeded
from finetune.data.encoding.chat import set_chat_template
from finetune.data.encoding.tokenizer_facts import forgets_unknown_text, tokenizer_identity, unknown_ids
from finetune.data.features import Features
from finetune.data.order.mixing import mixed
from finetune.data.order.order import steps_for_tokens
from finetune.data.order.pool import Pool, fingerprint_of
from finetune.data.prepared.cache import Watch, cache_folder, prepare_set
from finetune.data.prepared.set_pool import by_length, set_pool
from finetune.data.prepared.store import PreparedSet
from finetune.data.sources.source import OpenedSources, Source, open_sources, rows_read, stream_of, texts
from finetune.data.streams.stream import stream_pool
from finetune.model.processing import Processing, load_processing
from finetune.report.announcer import Announcer
from finetune.run.layout import layout_lines, settled
from finetune.runtime import ranks
from finetune.runtime.seeds import derive
from finetune.task.kernels import usable
from finetune.task.materials import Materials
from finetune.task.protocol import Task
from finetune.task.registry import build_task, reads
from finetune.train.answer import Metric, load_metrics
from finetune.train.plan import Plan, make_plan

_FORGETFUL = (
    "warning: the tokenizer has neither an unknown token nor bytes: characters that it does not know vanish "
    "uncounted. Look at `finetune preview`, or choose another tokenizer."
)


@dataclass(frozen=True)
class Lessons:
    """What there is to learn, the same on every rank."""

    processing: Processing
    task: Task
    training: Pool
    sources: Mapping[str, Prepared | Streamed]  # what the pool is made of, by place in the job YAML: for the audit
    validation_set: PreparedSet | None
    answer_metrics: dict[str, Metric]

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer; None where there are only images."""
        return self.processing.tokenizer

    def sample_at(self, position: int) -> Features:
        """Return the first sample at the position: of a stream, one that is needed soon."""
        return self.training.samples[int(self.training.order.samples(position, position + 1)[0])]


def make_lessons(config: RunConfig, say: Announcer, *, watch: Watch | None = None) -> Lessons:
    """Return what there is to learn; one process tokenises, the others wait on a file and in no collective."""
    data = config.data
    generate = config.evaluate.generate if config.evaluate else None
    answer_metrics = load_metrics(generate.metrics if generate else ())
    sources = open_sources(data, seed=config.run.seed, say=say)
    processing = _processing(config, sources, say)
    rows = partial(rows_read, sources.train)
    kernel, warnings = usable(config.train.loss_kernel)
    layout = settled(config)
    materials = Materials(
        config.task, layout, processing.tokenizer, processing.processor, rows=rows, loss_kernel=kernel
    )
    task = build_task(materials)
    for line in (*warnings, *task.found, *layout_lines(config, layout)):
        say(line)
    how: dict[str, Any] = {
        "encode": task.encoder,
        "section": data,
        "identity": input_identity(processing, task),
        "unknown_ids": unknown_ids(processing.tokenizer) if processing.tokenizer is not None else frozenset(),
        "length": task.lengths,
        "say": say,
    }
    prepare: Callable[[Source], PreparedSet] = partial(prepare_set, **how, watch=watch)
    stream: Callable[..., tuple[Pool, Streamed]] = partial(stream_pool, **how)
    known: dict[str, Prepared | Streamed] = {}
    pools = [_pool_of(source, config, prepare=prepare, stream=stream, known=known) for source in sources.train]
    refuse_exceeded(known, data.audit)
    validation_set = prepare(sources.validation) if sources.validation else None
    return Lessons(processing, task, _as_one(pools, config), known, validation_set, answer_metrics)


def input_identity(processing: Processing, task: Task) -> dict[str, str]:
    """Return all that decides what becomes of a row beside `data:`, by name: part of a prepared set's key."""
    identity = dict(processing.identity)
    if processing.tokenizer is not None:
        identity |= tokenizer_identity(processing.tokenizer)
    if task.encoding:
        identity["task"] = fingerprint_of(json.dumps(task.encoding, sort_keys=True))
    return identity


def _processing(config: RunConfig, sources: OpenedSources, say: Announcer) -> Processing:
    """Return what the model's inputs are made with, the chat template set."""
    processing = load_processing(
        config.model,
        reads=reads(config.task.name),
        texts=partial(texts, sources.train),
        cache_folder=cache_folder(config.data),
        say=say,
        image_size=config.data.images.size,
    )
    if processing.tokenizer is not None:
        set_chat_template(processing.tokenizer, config.data.chat_template)
        if forgets_unknown_text(processing.tokenizer):
            say(_FORGETFUL)
    return processing


def _pool_of(
    source: Source,
    config: RunConfig,
    *,
    prepare: Callable[[Source], PreparedSet],
    stream: Callable[..., tuple[Pool, Streamed]],
    known: dict[str, Prepared | Streamed],
) -> Pool:
    """Return the source as a pool, and put into `known` what an audit can tell of it."""
    seed = derive(config.run.seed, source.key) if config.data.train.mix else config.run.seed
    if stream_of(source.section) is not None:
        pool, known[source.key] = stream(source, seed=seed)
        return pool
    known[source.key] = prepared = prepare(source)
    return set_pool(prepared, config.data, seed=seed, key=source.key)


def _as_one(pools: Sequence[Pool], config: RunConfig) -> Pool:
    """Return the pools mixed as the job says, sorted by length where it says so."""
    data, seed = config.data, config.run.seed
    pool = mixed(pools, data.train, seed=seed, unit=data.batching.unit) if data.train.mix else pools[0]
    return by_length(pool, data.batching, seed=seed, global_batch_size=config.train.global_batch_size)


def make_run_plan(config: RunConfig, lessons: Lessons) -> Plan:
    """Return the number of steps and the shape of each, and what there is to say of the data that they see."""
    training, batch = lessons.training, config.train.global_batch_size
    plan = make_plan(
        config.train,
        num_positions=training.order.num_positions,
        unit=config.data.batching.unit,
        world=ranks.world(),
        steps_for_tokens=partial(_steps_for_tokens, training, batch),
    )
    return replace(plan, arithmetic=(*plan.arithmetic, *training.lines(plan.num_steps * batch)))


def _steps_for_tokens(training: Pool, global_batch_size: int, tokens: int) -> int:
    return steps_for_tokens(
        training.order,
        training.samples.lengths_of,
        epoch_tokens=training.epoch_tokens,
        global_batch_size=global_batch_size,
        tokens=tokens,
    )
