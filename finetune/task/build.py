"""Builds the task of a job by name."""

from typing import cast

from finetune.registry.losses import PREFERENCE_LOSSES
from finetune.registry.table import import_attribute
from finetune.registry.tasks import TASKS
from finetune.task.protocol import Task, TaskContext


def build_task(context: TaskContext) -> Task:
    """Return the job's task; raises DataError if tokenizer or rows are unsuitable for it."""
    return cast(Task, TASKS.resolve(context.section.name)(context))


def preference_task(context: TaskContext) -> Task:
    """Return the task of the configured preference loss; that of KTO has single answers instead of pairs."""
    return cast(Task, import_attribute(PREFERENCE_LOSSES[context.section.preference.loss].task)(context))
