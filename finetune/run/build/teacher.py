"""The teacher of a distillation: loaded unsharded beside the student, identified by a digest."""

from accelerate import Accelerator
from torch import nn

from finetune.config.run_config import RunConfig
from finetune.model.frozen_models import check_teacher_tokenizer, load_teacher, teacher_digest
from finetune.model.size import measure_model
from finetune.report.run_log import RunLog
from finetune.runtime import distributed
from finetune.runtime.distributed import run_on_rank_0
from finetune.strategy.upstream import unsharded
from finetune.task.distillation import DistillationTask
from finetune.task.protocol import Task


def attach_teacher(config: RunConfig, task: Task, accelerator: Accelerator, *, log: RunLog) -> Task:
    """Return the task with the teacher that answers it live; as it is, where it needs none. Raises ModelError."""
    if not isinstance(task, DistillationTask) or task.section.cache:
        return task
    return task.attach_teacher(load_unsharded_teacher(config, task, accelerator, log=log))


def load_unsharded_teacher(config: RunConfig, task: Task, accelerator: Accelerator, *, log: RunLog) -> nn.Module:
    """Return the teacher, whole on this rank's device: never wrapped, trained or saved; raises ModelError."""
    assert isinstance(task, DistillationTask)
    section, model = task.section, config.model
    check_teacher_tokenizer(section, model=model, tokenizer=task.tokenizer)
    with unsharded(accelerator):
        size = len(task.tokenizer)
        teacher: nn.Module = load_teacher(section, model=model, vocabulary_size=size, device=accelerator.device)
    log(f"teacher {section.teacher}, whole in every process: {measure_model(teacher).lines[1]}")
    return teacher


def teacher_identity(config: RunConfig, *, log: RunLog) -> str | None:
    """Return what identifies the teacher's weights, None where there is none. Collective."""
    section = config.task.distillation
    if section is None:
        return None
    distributed.open_background_group()  # its time limit allows for reading hundreds of gigabytes
    digest: str = run_on_rank_0(
        lambda: teacher_digest(section, model=config.model, log=log), group=distributed.Group.BACKGROUND
    )
    return digest
