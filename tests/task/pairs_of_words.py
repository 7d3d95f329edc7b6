"""Rows of answers, and tasks that learn from them, for the tests of preference tuning and rewards."""

import torch

from finetune.config.sections.task import TaskSection
from finetune.data.features import Features
from finetune.task.protocol import Task, TaskContext, build_task

ANSWERS = (("Two and two is four.", "What?"), ("four", "two two two"), ("is two", "and"), ("And four?", "two is"))


def turn(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def pair(chosen: str, rejected: str, **more) -> dict:
    prompt = [turn("user", "What is two and two?")]
    return {"prompt": prompt, "chosen": [turn("assistant", chosen)], "rejected": [turn("assistant", rejected)], **more}


def judged(answer: str, is_good: bool) -> dict:
    prompt = [turn("user", f"What is {answer[:3]}?")]
    return {"prompt": prompt, "completion": [turn("assistant", answer)], "is_good": is_good}


PAIRS = [pair(*answers) for answers in ANSWERS]
JUDGED = [judged(answer, place % 3 == 0) for place, answer in enumerate(word for pair in ANSWERS for word in pair)]


def task_of(tokenizer, data, name: str, **section) -> Task:
    written = {"name": name, name: section}
    return build_task(TaskContext(TaskSection.model_validate(written), data, tokenizer))


def encoded(task: Task, rows: list[dict], reference: torch.nn.Module | None = None) -> list[Features]:
    """Return the samples of the rows, with what the reference says of them where the task asks."""
    made = task.encode(rows)
    assert all(isinstance(each, Features) for each in made)
    samples = [Features(each.arrays, sample_id) for sample_id, each in enumerate(made)]
    if reference is None or task.precomputed is None:
        return samples
    with torch.no_grad():
        known = task.precomputed.compute(reference, task.collate(samples))
    return [Features({**each.arrays, **more}, each.sample_id) for each, more in zip(samples, known, strict=True)]


def nudged(model: torch.nn.Module, *, by: float) -> torch.nn.Module:
    """Move every weight a little, so that the model is no longer its reference."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=by)
    return model
