"""The task of a job, by its name."""

from typing import cast

from finetune.registry.losses import PREFERENCE_LOSSES
from finetune.registry.table import import_attribute
from finetune.registry.tasks import TASKS
from finetune.task.protocol import Task, TaskContext


def build_task(context: TaskContext) -> Task:
    """Return the task of that name; raises DataError when the tokenizer or the rows cannot serve it."""
    return cast(Task, TASKS.resolve(context.section.name)(context))


def preference_task(context: TaskContext) -> Task:
    """Return the task that trains with the loss: KTO's answers are judged one by one."""
    return cast(Task, import_attribute(PREFERENCE_LOSSES[context.section.preference.loss].task)(context))
