"""How far a run is: the few counters that grow, how they are read back from a checkpoint, and what is due at a step."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from finetune.runtime.files.read import first_problem, parse_json

VERSION = 3
_VERSION_OF_IDS_ONLY = 2
"""The version before: its digest of samples is of their ids alone."""


@dataclass
class Progress:
    """What a run has done so far, counted over all ranks. The data position is `step` times the global batch."""

    step: int = 0  # optimizer steps taken, skipped ones included
    num_tokens: int = 0  # padding not counted
    num_targets: int = 0
    num_scale_skips: int = 0  # fp16: steps left out because the loss scale was too high
    num_nonfinite_skips: int = 0
    seconds: float = 0.0  # of training, over all starts
    best_metric: float | None = None  # of early stopping
    evaluations_since_best: int = 0
    last_metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    metrics_step: int = 0  # when that was
    samples_sha256: str = ""  # rolled over the samples of every step
    knows_contents: bool = True  # that digest is of ids and contents; False: of ids alone, as it was once

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain types."""
        values = {name: value for name, value in asdict(self).items() if name != "knows_contents"}
        return {"version": VERSION if self.knows_contents else _VERSION_OF_IDS_ONLY, **values}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "Progress":
        """Return the progress that `state_dict` described; raises ValueError for another version."""
        version = state.get("version")
        if version not in (VERSION, _VERSION_OF_IDS_ONLY):
            raise ValueError(f"progress has version {version}; this program reads version {VERSION}")
        values = {name: value for name, value in state.items() if name != "version"}
        return cls(**values, knows_contents=version == VERSION)


MAX_COUNT = 2**53
"""No count of a run is larger: a thousand steps a second for 285,000 years."""

MAX_STEPS = 10**9
"""No run has more steps: the digest of its samples could not be recomputed."""

_MAX_TEXT_LENGTH = 1000
_BOUNDED: Mapping[Any, Any] = {
    int: Annotated[int, Field(ge=0, le=MAX_COUNT)],
    float: float,
    float | None: float | None,
    str: Annotated[str, Field(max_length=_MAX_TEXT_LENGTH)],
}
"""From the type of a field to the values that are accepted: all numbers are counts."""


class UnsupportedVersion(ValueError):
    """The progress is of a version that this program does not read: no damage."""


def parse_progress(content: bytes | str) -> Progress:
    """Return the progress; raises OtherVersion for another version's, ValueError for anything that is none."""
    state = parse_json(content)
    if not isinstance(state, dict):
        raise ValueError("it is not a JSON object")
    version = state.get("version")
    if isinstance(version, bool) or not isinstance(version, int):
        raise ValueError("version: it is missing")
    try:
        progress = Progress.from_state_dict(state)
    except TypeError as error:
        raise ValueError(str(error).removeprefix("Progress.__init__() ")) from None
    except ValueError as error:
        raise (UnsupportedVersion(str(error)) if version != VERSION else error) from None
    _validate(progress, state=state)
    return progress


def _validate(progress: Progress, *, state: Mapping[str, Any]) -> None:
    names = {field.name for field in fields(Progress)} - {"knows_contents"}  # implied by the version
    if state["version"] == VERSION and (missing := sorted(names - state.keys())):
        raise ValueError(f"{missing[0]}: it is missing")
    try:
        _schema().model_validate(asdict(progress))
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None
    for name in ("step", "metrics_step"):
        if getattr(progress, name) > MAX_STEPS:
            raise ValueError(f"{name}: {getattr(progress, name)} steps are out of range; the maximum is {MAX_STEPS}")


@cache
def _schema() -> type[BaseModel]:
    """Return the schema that follows from the dataclass, so that a new field is checked without a line here."""
    schema_fields: dict[str, Any] = {
        field.name: (_BOUNDED.get(field.type, field.type), ...) for field in fields(Progress)
    }
    return create_model("StoredProgress", __config__=ConfigDict(strict=True, extra="forbid"), **schema_fields)


@dataclass(frozen=True)
class Cadence:
    """Every N steps, and always at the last one; so nothing is special after the loop."""

    every_steps: int | None  # None: only at the last step
    num_steps: int

    def due(self, step: int) -> bool:
        """Return whether it is due once `step` steps are done."""
        return step == self.num_steps or (self.every_steps is not None and step % self.every_steps == 0)


@dataclass(frozen=True)
class NeverDue:
    """Never due."""

    def due(self, step: int) -> bool:
        """Return False."""
        return False
