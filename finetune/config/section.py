"""What every section of the job YAML is made of: strict, frozen, and explained key by key."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A part of the job YAML: unknown keys are errors, values are never coerced, nothing can be changed afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, protected_namespaces=())


class RelativeToConfig:
    """Marks a path that is resolved against the folder of the config file."""


Path = Annotated[str, RelativeToConfig()]
"""A path; a relative one is resolved against the folder of the config file, `~` against the home folder."""

Strings = Annotated[tuple[str, ...], Field(strict=False)]
Floats = Annotated[tuple[float, ...], Field(strict=False)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


def key(description: str, default: Any = ..., **constraints: Any) -> Any:
    """Declare a key with the sentence that the reference page prints; without a default it is required."""
    return Field(default, description=description, **constraints)
