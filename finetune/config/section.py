"""The base of the sections of a job file: the strict, frozen base class, types of values, and dotted keys.

Every number has an upper bound: far above any use, and below what overflows or never ends. A dotted key such as
`train.optimizer.name` knows the line, or the override, in which it was written.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from finetune.errors import Problem
from finetune.registry.table import Table


class Section(BaseModel):
    """A part of the job YAML: unknown keys are errors, values are never coerced, nothing can be changed afterwards."""

    model_config = ConfigDict(
        defer_build=True,
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )


class NamedSection(Section):
    """A section for which the text of its `name` may be written alone; see `expand_names`."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Allow a text instead of the section."""
        return {"anyOf": [{"type": "string", "format": "name or path"}, handler(core_schema)]}


NAMED_SECTIONS = ("model", "model.tokenizer", "model.image_processor")


def expand_names(values: dict[str, Any], locations: dict[str, Any]) -> None:
    """Replace `model: NAME` by `model: {name: NAME}`, as for all of `NAMED_SECTIONS`; both are changed in place.

    `locations` are lines or sources by dotted key: the name gets that of the text.
    """
    for key in NAMED_SECTIONS:
        outer, _, name = key.rpartition(".")
        section = values.get(outer) if outer else values
        if isinstance(section, dict) and isinstance(section.get(name), str):
            section[name] = {"name": section[name]}
            if key in locations:
                locations[f"{key}.name"] = locations[key]


@dataclass(frozen=True)
class RelativeToConfig:
    """Marks a path that is resolved against the folder of the config file, or a text that may be such a path.

    With `only_marked`, only a text that begins with `.`, `/` or `~` is a path; anything else is a name and stays.
    """

    only_marked: bool = False

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Add the format to the schema; editors ignore it, the reference page prints it."""
        schema = handler(core_schema)
        schema["format"] = "name or path" if self.only_marked else "path"
        return schema


@dataclass(frozen=True)
class OneOf:
    """Marks a text that names an entry of a table; entries that are registered later are allowed, too."""

    table: Table[Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Accept the names in the table at the time of the validation."""
        return core_schema.no_info_plain_validator_function(self._validate)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """List the names; of a table that only plugins fill, none may be known."""
        names = {"enum": list(self.table.choices)} if self.table.choices else {"format": "name of a plugin"}
        return {**names, "type": "string"}

    def _validate(self, value: Any) -> str:
        if not isinstance(value, str) or value not in self.table.choices:
            raise PydanticKnownError("literal_error", {"expected": ", ".join(self.table.choices)})
        return value


Name = Annotated[str, Field(min_length=1, pattern=r"\S")]
"""A text that is not blank."""

Path = Annotated[Name, RelativeToConfig()]
"""A path; a relative one is resolved against the folder of the config file, `~` against the home folder."""

NameOrPath = Annotated[Name, RelativeToConfig(only_marked=True)]
"""A name, or a path if it begins with `.`, `/` or `~`; a path is resolved as above."""

Strings = Annotated[tuple[str, ...], Field(strict=False)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


def key(description: str, default: Any = ..., **constraints: Any) -> Any:
    """Declare a key with the sentence that the reference page prints; without a default it is required."""
    return Field(default, description=description, **constraints)


MAX_COUNT = 1_000_000_000
"""A number of steps."""

MAX_FACTOR = 1e6
"""Of a weight, a factor or a scale."""

MAX_MIX_ROWS = 100_000_000
"""Positions of a mix whose order is drawn at once."""

Positive = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
NumRows = Annotated[int, Field(ge=0, le=1_000_000_000_000)]
MixRows = Annotated[int, Field(ge=1, le=MAX_MIX_ROWS)]
PositiveRows = Annotated[int, Field(ge=1, le=1_000_000_000_000)]
BatchSize = Annotated[int, Field(ge=1, le=1 << 24)]
Length = Annotated[int, Field(ge=1, le=100_000_000)]  # of a text, in tokens
Width = Annotated[int, Field(ge=1, le=1 << 16)]  # of a layer
Pixels = Annotated[int, Field(ge=1, le=16_384)]  # of one side of an image
ImageArea = Annotated[int, Field(ge=1, le=16_384**2)]  # in pixels
LayerNumber = Annotated[int, Field(ge=0, le=10_000)]
Workers = Annotated[int, Field(ge=0, le=512)]
Prefetch = Annotated[int, Field(ge=1, le=1_000)]  # number of prefetched items
Seed = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
Factor = Annotated[float, Field(ge=0.0, le=MAX_FACTOR)]
PositiveFactor = Annotated[float, Field(gt=0.0, le=MAX_FACTOR)]
Ratio = Annotated[float, Field(gt=0.0, le=1e12)]  # to other such numbers, and of passes over rows
Shift = Annotated[float, Field(ge=-MAX_FACTOR, le=MAX_FACTOR)]
Position = Annotated[int, Field(ge=0, le=1_000_000)]  # of a column
Delimiter = Annotated[str, Field(min_length=1, max_length=1)]

DELIMITED_KINDS = (".csv", ".tsv")
CONLL_KINDS = (".conll", ".bio", ".iob2")
TEXT_KINDS = (".jsonl", ".json", *DELIMITED_KINDS, ".txt", *CONLL_KINDS)
TABLE_KINDS = (".parquet", ".arrow")
"""Endings of the files that can be read; the texts also when they are compressed."""

KINDS_OF_KEYS: Mapping[str, tuple[str, ...]] = {
    "delimiter": DELIMITED_KINDS,
    "quotes": DELIMITED_KINDS,
    "encoding": TEXT_KINDS,
    "records": (".json",),
}
"""The kinds of files that read a key of a source."""

KINDS_WITH_POSITIONS = (*DELIMITED_KINDS, *CONLL_KINDS)
"""The kinds of files whose columns have positions."""


@dataclass(frozen=True)
class KeyLocation:
    """The file and line, or the override, in which a key was written."""

    where: str  # `job.yaml`, or `--set train.steps=4`
    line: int | None = None  # None for an override

    def __str__(self) -> str:
        return self.where if self.line is None else f"{self.where} line {self.line}"


KeyLocations = Mapping[str, KeyLocation]
"""The source of every dotted key that was written, sections included; a key that is missing here has its default."""


def with_location(problem: Problem, sources: KeyLocations) -> Problem:
    """Return the problem with the line or the override in which its key was written, if it was written at all."""
    source = sources.get(problem.key)
    if source is None or problem.line is not None or problem.source is not None:
        return problem
    if source.line is None:
        return replace(problem, source=source.where)
    return replace(problem, line=source.line)


def parent_keys(key: str) -> Iterator[str]:
    """Yield the keys of the sections and lists around a dotted key, innermost first.

    >>> list(parent_keys("data.train.path"))
    ['data.train', 'data']
    """
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


def join_key(*parts: str | int) -> str:
    """Return the parts as one dotted key; empty parts are left out.

    >>> join_key("", "data", "train", 0)
    'data.train.0'
    """
    return ".".join(str(part) for part in parts if part != "")


def is_written(config: Section, key: str) -> bool:
    """Return whether the dotted key was written and asks for something: `null`, `false` and empty lists do not."""
    section, name = _inside(config, key)
    if section is None or name not in section.model_fields_set:
        return False
    value = getattr(section, name)
    return not (value is None or value is False or value in ((), {}))


def has_key(config: Section, key: str) -> bool:
    """Return whether the dotted key exists: none of its sections is null."""
    return _inside(config, key)[0] is not None


def _inside(config: Section, key: str) -> tuple[Section | None, str]:
    *sections, name = key.split(".")
    section: Any = config
    for part in sections:
        section = section[int(part)] if isinstance(section, tuple) else getattr(section, part)
        if not isinstance(section, Section | tuple):  # null, or the text of a NamedSection
            return None, name
    return section, name
