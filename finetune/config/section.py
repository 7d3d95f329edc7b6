"""What every section of the job YAML is made of: strict, frozen, and explained key by key."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler


class Section(BaseModel):
    """A part of the job YAML: unknown keys are errors, values are never coerced, nothing can be changed afterwards."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )


@dataclass(frozen=True)
class RelativeToConfig:
    """Marks a path that is resolved against the folder of the config file, or a text that may be such a path.

    With `only_marked`, only a text that begins with `.`, `/` or `~` is a path; anything else is a name and stays.
    """

    only_marked: bool = False

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Say in the schema what the text is; editors ignore it, the reference page prints it."""
        schema = handler(core_schema)
        schema["format"] = "name or path" if self.only_marked else "path"
        return schema


Path = Annotated[str, RelativeToConfig()]
"""A path; a relative one is resolved against the folder of the config file, `~` against the home folder."""

NameOrPath = Annotated[str, RelativeToConfig(only_marked=True)]
"""A name, or a path when it begins with `.`, `/` or `~`; a path is resolved as above."""

Strings = Annotated[tuple[str, ...], Field(strict=False)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


def key(description: str, default: Any = ..., **constraints: Any) -> Any:
    """Declare a key with the sentence that the reference page prints; without a default it is required."""
    return Field(default, description=description, **constraints)
