"""A tiny job of every task, which the table of tasks and strategies and the tests run under all of them."""

from task_cases import language
from task_cases.case import Case

CASES: tuple[Case, ...] = (*language.CASES,)
