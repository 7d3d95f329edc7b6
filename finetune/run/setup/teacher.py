"""The teacher of a distillation: loaded unsharded next to the student, identified by a digest."""

from accelerate import Accelerator
from torch import nn

from finetune.config.run_config import RunConfig
from finetune.config.sections.model import ModelSection
from finetune.model.frozen_models import check_teacher_tokenizer, load_teacher, teacher_digest
from finetune.model.size import measure_model
from finetune.report.run_log import RunLog
from finetune.runtime.distributed import run_on_rank_0
from finetune.strategy.upstream import unsharded
from finetune.task.distillation import DistillationTask
from finetune.task.protocol import Task


def attach_teacher(model: ModelSection, task: Task, *, accelerator: Accelerator, log: RunLog) -> Task:
    """Return the task with its live teacher; as it is where it has none. Raises ModelError."""
    if not isinstance(task, DistillationTask) or task.section.cache:
        return task
    return task.attach_teacher(load_unsharded_teacher(model, task, accelerator=accelerator, log=log))


def load_unsharded_teacher(model: ModelSection, task: Task, *, accelerator: Accelerator, log: RunLog) -> nn.Module:
    """Return the teacher, unsharded on this rank's device: never wrapped, trained or saved; raises ModelError."""
    assert isinstance(task, DistillationTask)
    section = task.section
    check_teacher_tokenizer(section, model=model, tokenizer=task.tokenizer)
    with unsharded(accelerator):
        size = len(task.tokenizer)
        teacher: nn.Module = load_teacher(section, model=model, vocabulary_size=size, device=accelerator.device)
    log(f"teacher {section.teacher}, unsharded in every process: {measure_model(teacher).lines[1]}")
    return teacher


def teacher_identity(config: RunConfig, *, log: RunLog) -> str | None:
    """Return what identifies the teacher's weights, None where there is no teacher. Collective."""
    section = config.task.distillation
    if section is None:
        return None
    digest: str = run_on_rank_0(lambda: teacher_digest(section, model=config.model, log=log))
    return digest
