"""Where a value of the config comes from."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from finetune.errors import Problem


@dataclass(frozen=True)
class Source:
    """The file and line, or the override, in which a key was written."""

    where: str  # `job.yaml`, or `--set train.steps=4`
    line: int | None = None  # None for an override

    def __str__(self) -> str:
        return self.where if self.line is None else f"{self.where} line {self.line}"


Sources = Mapping[str, Source]
"""The source of every dotted key that was written, sections included; a key that is missing here has its default."""


def placed(problem: Problem, sources: Sources) -> Problem:
    """Return the problem with the line or the override in which its key was written, where it was written at all."""
    source = sources.get(problem.key)
    if source is None or problem.line is not None or problem.source is not None:
        return problem
    if source.line is None:
        return replace(problem, source=source.where)
    return replace(problem, line=source.line)


def ancestors(key: str) -> Iterator[str]:
    """Yield the keys of the sections and lists around a dotted key, innermost first.

    >>> list(ancestors("data.train.path"))
    ['data.train', 'data']
    """
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


def joined(*parts: str | int) -> str:
    """Return the parts as one dotted key; empty parts are left out.

    >>> joined("", "data", "train", 0)
    'data.train.0'
    """
    return ".".join(str(part) for part in parts if part != "")
