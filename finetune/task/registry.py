"""The tasks by name."""

from transformers import PreTrainedTokenizerBase

from finetune.config.sections.data import DataSection
from finetune.config.sections.task import TaskSection
from finetune.task.pretrain import PretrainTask
from finetune.task.protocol import Task
from finetune.task.sft import SftTask

TASKS = {"sft": SftTask, "pretrain": PretrainTask}


def build_task(section: TaskSection, *, tokenizer: PreTrainedTokenizerBase, data: DataSection) -> Task:
    """Return the task of that name; raises DataError when the tokenizer cannot serve it."""
    return TASKS[section.name](tokenizer, data)
