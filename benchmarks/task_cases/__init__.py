"""A tiny job of every task, which the table of tasks and strategies and the tests run under all of them."""

from task_cases import (
    adapters,
    classification,
    distillation,
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
from task_cases.case import Case

CASES: tuple[Case, ...] = (
    *adapters.CASES,
    *classification.CASES,
    *distillation.CASES,
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
