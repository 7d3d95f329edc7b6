"""The events of a run, and events.jsonl, which has a line of each. The class names are the values of `event` there."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from finetune.runtime.text.redact import redact_known_values, redacted_config
from finetune.runtime.text.terminal import format_json

Step = Annotated[int, Field(ge=0, lt=1 << 53, strict=True)]
UnixTime = Annotated[float, Field(ge=0, lt=1e11, allow_inf_nan=False)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]*$")]

_MAX_DEPTH = 32
_MAX_INTEGER = 1 << 63


@dataclass(frozen=True)
class Event:
    """Something that happened at a step."""

    step: int


@dataclass(frozen=True)
class RunStarted(Event):
    """Training begins; has the numbers to check first.

    `arithmetic` holds lines such as `256 per step = 4 processes x 8 per microbatch x 8 accumulated`.
    """

    num_steps: int
    strategy: str
    arithmetic: tuple[str, ...]
    config: Mapping[str, Any]
    flops_per_token: float | None = None  # of training, recomputation not counted; None if unknown
    peak_flops_per_second: float | None = None  # of all ranks together; None on a CPU or an unknown GPU
    previous: Mapping[str, Any] = field(default_factory=dict)  # the end of the previous start, from status.json
    device_price: Mapping[str, Any] = field(default_factory=dict)  # `usd_per_hour` of one device, and its `source`
    parameter_groups: Mapping[str, str] = field(default_factory=dict)  # settings of tensors by pattern of their names


@dataclass(frozen=True)
class StartedUp(Event):
    """The first step of a process is over; has the time of each phase until then, and the resident memory."""

    seconds: Mapping[str, float]
    cpu_seconds: Mapping[str, float]
    memory_bytes: Mapping[str, int]


@dataclass(frozen=True)
class StepTaken(Event):
    """One optimizer step: losses in nats per target, times in seconds, tokens over all ranks (padding not counted).

    `samples_sha256` is the rolled digest of all samples consumed so far, this step's included.
    """

    loss: float
    gradient_norm: float
    learning_rate: float
    num_targets: int
    num_tokens: int
    samples_sha256: str
    epoch: float | None  # passes over the training data; None for a stream
    seconds: float
    data_seconds: float  # waited for batches
    data_share: float  # the same as a share of `seconds`
    memory_bytes: int  # peak of this rank: device memory, or resident memory on CPU
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the task, in addition to the loss
    device: Mapping[str, float] = field(default_factory=dict)  # this rank's GPU, by `report/gpu.py`
    layers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # with `run.record_layers`


@dataclass(frozen=True)
class Profiled(Event):
    """The time of a window of steps: `seconds` by phase are this rank's and add up to `wall_seconds`.

    `communication` is the exposed part, which no computation hides; `ranks` has `min`, `median` and `max` over the
    ranks and the `slowest_rank` of each phase and of `wall`.
    """

    first_step: int
    num_steps: int
    seconds: Mapping[str, float]
    wall_seconds: float
    trace: str  # of this rank, a path; empty if it could not be written
    overlapped_seconds: float = 0.0  # of communication that overlaps with computation
    ranks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class StepSkipped(Event):
    """A step without an update: `reason` is `loss scale` (fp16) or `non-finite`."""

    reason: str
    sample_ids: tuple[int, ...]
    rows: str = ""  # the location of the first of them in the data


@dataclass(frozen=True)
class Evaluated(Event):
    """An evaluation and its metrics."""

    metrics: Mapping[str, float]
    num_rows: int
    seconds: float


@dataclass(frozen=True)
class Answered(Event):
    """One prompt, the model's answer and the reference, as text."""

    prompt: str
    answer: str
    reference: str


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint is complete on disk; training waited for `stall_seconds` of its `seconds`."""

    path: str
    size_bytes: int
    seconds: float
    stall_seconds: float


@dataclass(frozen=True)
class Noted(Event):
    """A message, such as a derived number or an automatic choice."""

    message: str


@dataclass(frozen=True)
class Warned(Event):
    """A message about something unexpected, or not done as requested."""

    message: str


@dataclass(frozen=True)
class RunEnded(Event):
    """The run is over. `reason` is `finished`, `time limit`, `early stopping`, `signal SIGTERM`, ..."""

    reason: str
    seconds: float
    metrics: Mapping[str, float]  # of the last evaluation; empty without one
    final_folder: str | None  # of the exported model
    talks: bool = True  # whether the exported model generates text


def is_event(value: Any) -> bool:
    """Return whether the value of a line is an event: known events need the fields and types of their class."""
    if not isinstance(value, dict) or not isinstance(value.get("event"), str) or not _is_bounded(value):
        return False
    try:
        _schemas().get(value["event"], _AnyEvent).model_validate(value)
    except (ValidationError, OverflowError):
        return False
    return True


class _AnyEvent(BaseModel):
    """The fields of every event of every version."""

    model_config = ConfigDict(extra="ignore")
    step: Step
    time: UnixTime = 0.0


@functools.cache
def _schemas() -> Mapping[str, type[BaseModel]]:
    """Return a model for each class of event.

    Older versions wrote fewer fields of a start and of a step; of other events, only those with a default may be
    missing. NaN and infinities are written as strings, which floats may be.
    """
    schemas = {}
    for event in Event.__subclasses__():
        may_be_missing = event in (RunStarted, StartedUp, StepTaken)
        fields: dict[str, Any] = {}
        for attribute in dataclasses.fields(event):
            defaults = (attribute.default, attribute.default_factory)
            is_required = all(default is dataclasses.MISSING for default in defaults)
            fields[attribute.name] = (attribute.type, ... if is_required and not may_be_missing else None)
        fields["step"] = (Step, ...)
        if "samples_sha256" in fields:
            fields["samples_sha256"] = (Digest, "")
        schemas[event.__name__] = create_model(event.__name__, __base__=_AnyEvent, **fields)
    return schemas


def _is_bounded(value: Any, depth: int = 0) -> bool:
    """Return whether all numbers and the depth of nesting are within the limits."""
    if depth > _MAX_DEPTH:
        return False
    if isinstance(value, Mapping):
        return all(_is_bounded(item, depth + 1) for item in value.values())
    if isinstance(value, list):
        return all(_is_bounded(item, depth + 1) for item in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or abs(value) < _MAX_INTEGER


class JsonlReporter:
    """Writes every event as one line with its `event` name, unix `time` and all its fields.

    The file is opened at the first event and appended to, so a resumed run continues it (a step that is taken again
    then appears twice; the later line counts). Each line is flushed. NaN and infinities, which JSON lacks, are
    written as the strings `nan`, `inf` and `-inf`. `notes` were printed before the reporter existed; they are written
    before the first event.
    """

    def __init__(self, path: Path, *, notes: Sequence[str] = (), clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._notes = notes
        self._clock = clock
        self._file: Any = None

    def __call__(self, event: Event) -> None:
        """Write the event's line."""
        events: list[Event] = []
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a+b") as file:  # a run that was killed within a line left no newline
                if file.tell() > 0:
                    file.seek(-1, 2)
                    if file.read(1) != b"\n":
                        file.write(b"\n")
            self._file = self._path.open("a", encoding="utf-8")
            for note in self._notes:
                warning = note.removeprefix("warning: ")
                events.append(Noted(event.step, note) if warning == note else Warned(event.step, warning))
        for one in (*events, event):
            fields = event_fields(one, time=self._clock())
            self._file.write(format_json(fields, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def event_fields(event: Event, *, time: float) -> dict[str, Any]:
    """Return the event as plain JSON values without secrets, its name and time first; answers are data."""
    fields = {field.name: _plain(getattr(event, field.name)) for field in dataclasses.fields(event)}
    if "config" in fields:
        fields["config"] = redacted_config(fields["config"])
    return {"event": type(event).__name__, "time": round(time, 3), **redact_known_values(fields)}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return str(value)
