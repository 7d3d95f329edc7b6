"""A tiny job of every task, which tests/scenarios/test_every_task.py runs under every strategy."""

from tests.task_cases import (
    adapters,
    classification,
    distillation,
    embedding,
    experts,
    images,
    language,
    masked_lm,
    memory,
    merging,
    preference,
    seq2seq,
    training,
    vision_language,
)
from tests.task_cases.case import Case

CASES: tuple[Case, ...] = (
    *adapters.CASES,
    *classification.CASES,
    *distillation.CASES,
    *embedding.CASES,
    *experts.CASES,
    *images.CASES,
    *language.CASES,
    *masked_lm.CASES,
    *memory.CASES,
    *merging.CASES,
    *preference.CASES,
    *seq2seq.CASES,
    *training.CASES,
    *vision_language.CASES,
)
