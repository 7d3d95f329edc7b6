"""The tasks by name."""

from collections.abc import Callable, Mapping
from typing import Literal

from finetune.config.sections.task import TaskName
from finetune.task.materials import Materials
from finetune.task.pretrain import PretrainTask
from finetune.task.protocol import Task
from finetune.task.sft import SftTask

Reads = Literal["text", "images", "both"]

TASKS: dict[str, Callable[[Materials], Task]] = {"sft": SftTask, "pretrain": PretrainTask}

READS: Mapping[TaskName, Reads] = {"image_classification": "images", "vision_language_sft": "both"}
"""What a task's rows hold; text, where nothing is said."""


def build_task(materials: Materials) -> Task:
    """Return the task of that name; raises DataError when the tokenizer or the rows cannot serve it."""
    return TASKS[materials.section.name](materials)


def reads(name: TaskName) -> Reads:
    """Return what the rows of the task hold."""
    return READS.get(name, "text")
