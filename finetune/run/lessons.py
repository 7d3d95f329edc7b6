"""What there is to learn: tokenizer, task and tokenised rows, made without any process group."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from finetune.config.run_config import RunConfig
from finetune.data.audit import Prepared, Streamed, refuse_exceeded
from finetune.data.cache import Watch, cache_folder, prepare_set
from finetune.data.chat import set_chat_template
from finetune.data.encode import tokenizer_identity, unknown_ids
from finetune.data.features import Features
from finetune.data.order import steps_for_tokens
from finetune.data.pool import Pool
from finetune.data.set_pool import UNITS, by_length, set_pool
from finetune.data.sources import open_sources, texts
from finetune.data.store import PreparedSet
from finetune.model.tokenizer import load_tokenizer
from finetune.report.announcer import Announcer
from finetune.runtime import ranks
from finetune.task.protocol import Task
from finetune.task.registry import build_task
from finetune.train.answer import Metric, load_metrics
from finetune.train.plan import Plan, make_plan


@dataclass(frozen=True)
class Lessons:
    """What there is to learn, the same on every rank."""

    tokenizer: Any
    task: Task
    training: Pool
    sources: Mapping[str, Prepared | Streamed]  # what the pool is made of, by place in the job YAML: for the audit
    validation_set: PreparedSet | None
    answer_metrics: dict[str, Metric]

    def first_sample(self) -> Features:
        """Return the sample that is learnt from first."""
        return self.training.samples[int(self.training.order.samples(0, 1)[0])]


def make_lessons(config: RunConfig, say: Announcer, *, watch: Watch | None = None) -> Lessons:
    """Return what there is to learn; one process tokenises, the others wait on a file and in no collective."""
    data = config.data
    generate = config.evaluate.generate if config.evaluate else None
    answer_metrics = load_metrics(generate.metrics if generate else ())
    sources = open_sources(data, seed=config.run.seed, say=say)
    tokenizer = load_tokenizer(
        config.model,
        texts=partial(texts, sources.train),
        cache_folder=cache_folder(data),
        say=say,
    )
    set_chat_template(tokenizer, data.chat_template)
    task = build_task(config.task, tokenizer=tokenizer, data=data)
    prepare = partial(
        prepare_set,
        encode=task.encode,
        section=data,
        identity=tokenizer_identity(tokenizer),
        unknown_ids=unknown_ids(tokenizer),
        say=say,
        watch=watch,
    )
    train_sets = {source.key: prepare(source) for source in sources.train}
    refuse_exceeded(train_sets, data.audit)
    training = set_pool(train_sets["data.train"], data, seed=config.run.seed, key="data.train")
    validation_set = prepare(sources.validation) if sources.validation else None
    training = by_length(
        training, data.batching, seed=config.run.seed, global_batch_size=config.train.global_batch_size
    )
    return Lessons(tokenizer, task, training, train_sets, validation_set, answer_metrics)


def make_run_plan(config: RunConfig, lessons: Lessons) -> Plan:
    """Return the number of steps and the shape of each, and what there is to say of the data that they see."""
    training, batch = lessons.training, config.train.global_batch_size
    plan = make_plan(
        config.train,
        num_positions=training.order.num_positions,
        unit=UNITS[config.data.batching.by],
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
