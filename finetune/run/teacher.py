"""The teacher of a distillation: loaded beside the student, told by a digest, asked live or once for every sample."""

from accelerate import Accelerator
from torch import nn

from finetune.checkpoint.together import main_does
from finetune.config.run_config import RunConfig
from finetune.model.size import describe
from finetune.model.teacher import check_vocabulary, load_teacher, teacher_digest
from finetune.report.announcer import Announcer
from finetune.runtime import ranks
from finetune.strategy.apart import held_whole
from finetune.task.distillation import DistillationTask
from finetune.task.protocol import Task


def taught(config: RunConfig, task: Task, accelerator: Accelerator, *, say: Announcer) -> Task:
    """Return the task with the teacher that answers it live; as it is, where it needs none. Raises ModelError."""
    if not isinstance(task, DistillationTask) or task.section.cache:
        return task
    return task.taught_by(teacher_of(config, task, accelerator, say=say))


def teacher_of(config: RunConfig, task: Task, accelerator: Accelerator, *, say: Announcer) -> nn.Module:
    """Return the teacher, whole on this rank's device: never wrapped, trained or saved; raises ModelError."""
    assert isinstance(task, DistillationTask)
    section, model = task.section, config.model
    check_vocabulary(section, model=model, tokenizer=task.tokenizer)
    with held_whole(accelerator):
        size = len(task.tokenizer)
        teacher: nn.Module = load_teacher(section, model=model, vocabulary_size=size, device=accelerator.device)
    say(f"teacher {section.teacher}, whole in every process: {describe(teacher).lines[1]}")
    return teacher


def teacher_identity(config: RunConfig, *, say: Announcer) -> str | None:
    """Return what identifies the teacher's weights, None where there is none. Collective."""
    section = config.task.distillation
    if section is None:
        return None
    ranks.open_line_behind()  # its time limit allows for reading hundreds of gigabytes
    digest: str = main_does(lambda: teacher_digest(section, model=config.model, say=say), group=ranks.Group.BEHIND)
    return digest
