"""A progress that comes back from a disk: every field there, of its own type and within reason, and no other."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from finetune.runtime.json_files import first_problem, parse_json
from finetune.runtime.progress import VERSION, Progress

MOST = 2**53
"""No count of a run is larger: a thousand steps a second for 285,000 years."""

MOST_STEPS = 10**9
"""A run of more steps is none: the digest of its samples could not be worked out again."""

_LONGEST_TEXT = 1000
_BOUNDED: Mapping[Any, Any] = {
    int: Annotated[int, Field(ge=0, le=MOST)],
    float: float,
    float | None: float | None,
    str: Annotated[str, Field(max_length=_LONGEST_TEXT)],
}
"""What the dataclass says of a field, and what is let through: all of its numbers are counts."""


class OtherVersion(ValueError):
    """The progress is of a version that this program does not read: no damage."""


def parse_progress(content: bytes | str) -> Progress:
    """Return the progress; raises OtherVersion for another version's, ValueError for anything that is none."""
    state = parse_json(content)
    if not isinstance(state, dict):
        raise ValueError("it is no JSON object")
    version = state.get("version")
    if isinstance(version, bool) or not isinstance(version, int):
        raise ValueError("version: there is none")
    try:
        progress = Progress.from_state_dict(state)
    except TypeError as error:
        raise ValueError(str(error).removeprefix("Progress.__init__() ")) from None
    except ValueError as error:
        raise (OtherVersion(str(error)) if version != VERSION else error) from None
    _refuse_nonsense(progress, state=state)
    return progress


def _refuse_nonsense(progress: Progress, *, state: Mapping[str, Any]) -> None:
    names = {each.name for each in fields(Progress)} - {"knows_contents"}  # which the version says
    if state["version"] == VERSION and (missing := sorted(names - state.keys())):
        raise ValueError(f"{missing[0]}: it is missing")
    try:
        _schema().model_validate(asdict(progress))
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None
    for name in ("step", "metrics_step"):
        if getattr(progress, name) > MOST_STEPS:
            raise ValueError(f"{name}: {getattr(progress, name)} steps are no run's; at most {MOST_STEPS} are read")


@cache
def _schema() -> type[BaseModel]:
    """Return the schema that follows from the dataclass, so that a new field is checked without a word here."""
    wanted: dict[str, Any] = {each.name: (_BOUNDED.get(each.type, each.type), ...) for each in fields(Progress)}
    return create_model("StoredProgress", __config__=ConfigDict(strict=True, extra="forbid"), **wanted)
