"""The layouts in which people bring rows: how each is recognized, what a row means, and how a job reads it.

They stand in `layouts.toml`. `finetune preview`, `finetune init`, the message about rows that no format reads and the
warning about columns that a job leaves out ask them. A plugin adds a layout with `register.layout`.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from finetune.errors import RegistryError
from finetune.registry.table import Entry, Table


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The keys with which a job reads the rows of a layout.

    A role whose name is a column of the format is mapped to it. In a template `<role>` stands for the user's column,
    `<role.0>` for the first key of its objects, and `<role|turns>` for its transcript, split into turns; the text in
    `[[role: TEXT]]` is left out where rows lack the role. With `each`, there is one reading for every column of that
    role.
    """

    task: str
    format: str
    columns: Mapping[str, str] = field(default_factory=dict)  # from the format's column to a role of another name
    template: Mapping[str, str] = field(default_factory=dict)  # from the format's column to a Jinja text
    data: Mapping[str, Any] = field(default_factory=dict)  # further keys of `data`
    options: Mapping[str, Any] = field(default_factory=dict)  # keys of the task's own section
    why: str = ""  # what this reading is for, where a layout has several
    each: str = ""


@dataclass(frozen=True, kw_only=True)
class LayoutEntry(Entry):
    """A layout; its description completes "each row is ...".

    `roles` has `KIND: NAMES` for each role of a column: the column has one of the names (in lowercase, with `_` for
    other characters; `*` is any text; not one after `-`), and all of its values are of this kind (`KINDS` of
    `data.formats.layouts`; `a|b` is either of two). A `?` before the kind: rows may lack it; a `+`: all columns of
    these names have the role, at least as many as the digit after it. Rows without readings are not training rows, and
    `remedy` says what to make of them.
    """

    roles: Mapping[str, str]
    readings: tuple[Reading, ...] = ()
    remedy: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.description or bool(self.readings) == bool(self.remedy):
            raise RegistryError(f"layout `{self.name}`: it needs a description, and either readings or a remedy.")


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """A kind of column that changes what a row means: no proposal leaves it out without naming it.

    A job of one of the `formats` that does not read such a column is warned.
    """

    names: str  # as in `LayoutEntry.roles`
    says: str  # completes "the column ..."
    remedy: str  # how a job uses it; `<column>` is the user's
    formats: tuple[str, ...]

    def remedy_of(self, column: str) -> str:
        """Return the remedy for a column of this name."""
        return self.remedy.replace("<column>", column)


@dataclass(frozen=True, kw_only=True)
class Speakers:
    """The texts before the turns of a transcript, and after answers; empty where there is none."""

    user: str
    assistant: str
    system: str = ""
    tool: str = ""
    end: str = ""


@dataclass(frozen=True)
class LayoutTables:
    """The contents of `layouts.toml`; of each table, the first entry that fits counts."""

    layouts: tuple[LayoutEntry, ...]
    meanings: tuple[Meaning, ...]
    transcripts: tuple[Speakers, ...]


LAYOUTS: Table[LayoutEntry] = Table("layout", LayoutEntry)
"""The layouts of plugins, which are tried before the layouts of this package."""


@cache
def shipped_layouts() -> LayoutTables:
    """Return the tables of this package."""
    content = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    names: Mapping[str, str] = content["names"]

    def expanded(text: str) -> str:
        return re.sub(r"@(\w+)", lambda match: names[match[1]], text)

    layouts = []
    for entry in content["layout"]:
        readings = tuple(Reading(**reading) for reading in entry.pop("reading", ()))
        roles = {role: expanded(written) for role, written in entry.pop("roles").items()}
        layouts.append(LayoutEntry(**entry, roles=roles, readings=readings))
    meanings = [
        Meaning(**{**meaning, "names": expanded(meaning["names"]), "formats": tuple(meaning["formats"])})
        for meaning in content["meaning"]
    ]
    return LayoutTables(tuple(layouts), tuple(meanings), tuple(Speakers(**each) for each in content["transcript"]))
