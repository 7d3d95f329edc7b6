"""The progress of a run: its counters, their form in a checkpoint, and the cadence of actions at steps."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, create_model

from finetune.runtime.files.read import first_problem, parse_json

VERSION = 3
_VERSION_OF_IDS_ONLY = 2
"""The previous version, whose digest of samples covers only their ids."""


@dataclass
class Progress:
    """The counters of a run over all ranks. The data position is `step` times the global batch."""

    step: int = 0  # optimizer steps taken, skipped ones included
    num_tokens: int = 0  # padding not counted
    num_targets: int = 0
    num_scale_skips: int = 0  # fp16: steps skipped because the loss scale was too high
    num_nonfinite_skips: int = 0
    seconds: float = 0.0  # of training, over all starts
    best_metric: float | None = None  # of early stopping
    evaluations_since_best: int = 0
    last_metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    metrics_step: int = 0  # of the last evaluation
    samples_sha256: str = ""  # rolled over the samples of every step
    knows_contents: bool = True  # the digest covers ids and contents; False: only ids, as in earlier versions

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
"""Upper limit of all counts: a thousand steps a second for 285,000 years."""

MAX_STEPS = 10**9
"""Upper limit of steps: beyond it, the digest of the samples could not be recomputed."""

_MAX_TEXT_LENGTH = 1000
_BOUNDED: Mapping[Any, Any] = {
    int: Annotated[int, Field(ge=0, le=MAX_COUNT)],
    float: float,
    float | None: float | None,
    str: Annotated[str, Field(max_length=_MAX_TEXT_LENGTH)],
}
"""The accepted values by the type of a field: all integers are counts."""


class UnsupportedVersion(ValueError):
    """The progress has a version that this program does not read; it is not damaged."""


def parse_progress(content: bytes | str) -> Progress:
    """Return the progress; raises UnsupportedVersion for another version, ValueError for anything else."""
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
    names = {field.name for field in fields(Progress)} - {"knows_contents"}  # implied by the version
    if version == VERSION and (missing := sorted(names - state.keys())):
        raise ValueError(f"{missing[0]}: it is missing")
    try:
        _SCHEMA.model_validate(asdict(progress))
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None
    for name in ("step", "metrics_step"):
        if getattr(progress, name) > MAX_STEPS:
            raise ValueError(f"{name}: {getattr(progress, name)} steps are out of range; the maximum is {MAX_STEPS}")
    return progress


_FIELDS: dict[str, Any] = {field.name: (_BOUNDED.get(field.type, field.type), ...) for field in fields(Progress)}
_SCHEMA = create_model("StoredProgress", __config__=ConfigDict(strict=True, extra="forbid"), **_FIELDS)


@dataclass(frozen=True)
class Cadence:
    """Every N steps and at the last one, so that nothing is left to do after the loop."""

    every_steps: int | None  # None: only at the last step
    num_steps: int

    def due(self, step: int) -> bool:
        """Return whether it is due after `step` steps."""
        return step == self.num_steps or (self.every_steps is not None and step % self.every_steps == 0)


@dataclass(frozen=True)
class NeverDue:
    """Never due."""

    def due(self, step: int) -> bool:
        """Return False."""
        return False
