"""What a case is: a tiny job of one task, and how its export is measured again without our package."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LORA = ("model.lora={rank: 4, alpha: 8.0}",)


@dataclass(frozen=True)
class Case:
    """A job that takes a second or two: a handful of rows, a model of some thousand parameters, about four steps.

    Its losses must not depend on chance within a step: no dropout. Its global batch is shared by 1, 2 and 4 processes.
    """

    name: str
    job: str  # the job YAML; relative paths count from the folder that `prepare` writes into
    prepare: Callable[[Path], None]  # writes the rows, and whatever else the job reads, into the folder
    metric: str  # of the last evaluation, which is measured again on the export ...
    reload: Callable[[Path, Path], float]  # ... by this: (exported folder, prepare's folder), with transformers alone
    variants: Mapping[str, Sequence[str]] = field(default_factory=lambda: {"full": (), "lora": LORA})  # overrides
    exempt: Mapping[tuple[str, str], str] = field(default_factory=dict)  # (variant, strategy) -> upstream's reason
    is_extra: bool = False  # runs in the slow tier alone
