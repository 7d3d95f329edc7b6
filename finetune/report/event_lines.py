"""The lines of events.jsonl that are events, by the fields and types of the classes in events.py; others are counted.

The file of a run that was killed may end in a torn line, and a disk or a person may have changed any other.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from finetune.report import events as event_classes
from finetune.runtime.files.read import parse_json

Step = Annotated[int, Field(ge=0, lt=1 << 53, strict=True)]
UnixTime = Annotated[float, Field(ge=0, lt=1e11, allow_inf_nan=False)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]*$")]

_MAX_DEPTH = 32
_MAX_INTEGER = 1 << 63


@dataclass(frozen=True)
class EventLines:
    """The events of some lines in their order, and the number of lines that are none."""

    events: list[dict[str, Any]]
    num_damaged: int


def parse_event_lines(content: bytes) -> EventLines:
    """Return the events of these lines; blank lines count as nothing."""
    lines = [line for line in content.split(b"\n") if line.strip()]
    try:
        values: Sequence[Any] = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        values = []
    if len(values) != len(lines):
        values = [_parse_line(line) for line in lines]
    events = [value for value in values if _is_event(value)]
    return EventLines(events, len(lines) - len(events))


def _parse_line(line: bytes) -> Any:
    try:
        return parse_json(line)
    except (ValueError, RecursionError):
        return None


def _is_event(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("event"), str) or not _is_bounded(value):
        return False
    try:
        _schemas().get(value["event"], _AnyEvent).model_validate(value)
    except (ValidationError, OverflowError):
        return False
    return True


class _AnyEvent(BaseModel):
    """What each event has, of whatever version it is."""

    model_config = ConfigDict(extra="ignore")
    step: Step
    time: UnixTime = 0.0


@functools.cache
def _schemas() -> Mapping[str, type[BaseModel]]:
    """Return a model for each class of event: what is there has the right type; older versions wrote fewer fields.

    NaN and infinities are written as strings, which floats may be.
    """
    schemas = {}
    for event in vars(event_classes).values():
        if isinstance(event, type) and dataclasses.is_dataclass(event):
            fields: dict[str, Any] = {field.name: (field.type, None) for field in dataclasses.fields(event)}
            fields["step"] = (Step, ...)
            if "samples_sha256" in fields:
                fields["samples_sha256"] = (Digest, "")
            schemas[event.__name__] = create_model(event.__name__, __base__=_AnyEvent, **fields)
    return schemas


def _is_bounded(value: Any, depth: int = 0) -> bool:
    """Return whether no number overflows and nothing is nested without end."""
    if depth > _MAX_DEPTH:
        return False
    if isinstance(value, Mapping):
        return all(_is_bounded(item, depth + 1) for item in value.values())
    if isinstance(value, list):
        return all(_is_bounded(item, depth + 1) for item in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or abs(value) < _MAX_INTEGER
