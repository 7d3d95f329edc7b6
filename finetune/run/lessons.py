"""What there is to learn: tokenizer, task and tokenised rows, made without any process group."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from finetune.config.run_config import RunConfig
from finetune.data.cache import cache_folder, prepare_set
from finetune.data.chat import set_chat_template
from finetune.data.encode import tokenizer_identity
from finetune.data.order import SetOrder, steps_for_tokens
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
    train_set: PreparedSet
    validation_set: PreparedSet | None
    order: SetOrder
    answer_metrics: dict[str, Metric]


def make_lessons(config: RunConfig, say: Announcer) -> Lessons:
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
    prepare = partial(prepare_set, encode=task.encode, section=data, identity=tokenizer_identity(tokenizer), say=say)
    train_set = prepare(sources.train[0])
    validation_set = prepare(sources.validation) if sources.validation else None
    order = SetOrder(seed=config.run.seed, num_samples=len(train_set), shuffle=data.shuffle)
    return Lessons(tokenizer, task, train_set, validation_set, order, answer_metrics)


def make_run_plan(config: RunConfig, lessons: Lessons) -> Plan:
    """Return the number of steps and the shape of each."""

    def count_steps(tokens: int) -> int:
        batch = config.train.global_batch_size
        return steps_for_tokens(lessons.train_set.lengths, lessons.order, global_batch_size=batch, tokens=tokens)

    return make_plan(
        config.train, num_samples=len(lessons.train_set), world=ranks.world(), steps_for_tokens=count_steps
    )
