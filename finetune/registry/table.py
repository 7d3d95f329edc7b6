"""A table of entries that a job chooses by name: facts, and where each entry is implemented.

An entry is added by one `register`, by this package or by another one. Code that needs to know something about an
optimizer, a task or a loss asks its entry; nobody keeps a list of names.
"""

import difflib
import importlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from finetune.errors import RegistryError

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One thing that a job chooses by name. Raises RegistryError where it is invalid.

    `description` follows the name on the reference page. `implementation` is `package.module:attribute`, imported when
    it is used; empty where only the facts are needed. A job cannot choose an internal entry.
    """

    name: str
    description: str = ""
    implementation: str = ""
    is_internal: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise RegistryError(f"`{self.name}`: a name has lowercase letters, digits and underscores.")
        if self.implementation and not _PATH.fullmatch(self.implementation):
            raise RegistryError(f"{self.name}: `{self.implementation}` is not of the form package.module:attribute.")


EntryType = TypeVar("EntryType", bound=Entry)


class Table(Generic[EntryType]):
    """Entries by name, in the order in which they were registered."""

    def __init__(self, title: str, entry_type: type[EntryType], entries: Iterable[EntryType] = ()) -> None:
        """`title` is what one entry is called in messages, such as `optimizer`."""
        self.title = title
        self._entry_type = entry_type
        self._entries: dict[str, EntryType] = {}
        for entry in entries:
            self.register(entry)

    def register(self, entry: EntryType) -> None:
        """Add the entry; raises RegistryError for another type of entry, or where the name is taken."""
        if not isinstance(entry, self._entry_type):
            expected = self._entry_type.__name__
            raise RegistryError(f"{self.title} `{entry.name}`: is a {type(entry).__name__}, not a {expected}.")
        if (other := self._entries.get(entry.name)) is not None:
            raise RegistryError(
                f"{self.title} `{entry.name}`: the name is taken by {other.implementation or 'an entry without code'}, "
                f"so {entry.implementation or 'another entry'} cannot have it. Rename one of them."
            )
        self._entries[entry.name] = entry

    def __getitem__(self, name: str) -> EntryType:
        """Return the entry; raises RegistryError with the closest name for an unknown one."""
        if name in self._entries:
            return self._entries[name]
        near = difflib.get_close_matches(name, self._entries, n=1)
        hint = f"Did you mean `{near[0]}`?" if near else f"Known are {', '.join(self._entries)}."
        raise RegistryError(f"there is no {self.title} `{name}`. {hint}")

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[EntryType]:
        return iter(self._entries.values())

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the names that a job can choose."""
        return tuple(entry.name for entry in self if not entry.is_internal)

    def resolve(self, name: str) -> Any:
        """Return the implementation of the entry, which is imported now."""
        return import_attribute(self[name].implementation)

    def describe(self) -> str:
        """Return the sentences of the reference page: what each name that a job can choose means."""
        entries = [self[name] for name in self.choices]
        return " ".join(f"`{entry.name}`{entry.description and f': {entry.description}'}." for entry in entries)


def import_attribute(path: str) -> Any:
    """Return what `package.module:attribute` names; raises RegistryError where the module does not have it."""
    module, _, attribute = path.partition(":")
    found = importlib.import_module(module)
    if not hasattr(found, attribute):
        raise RegistryError(f"{path}: the module has no `{attribute}`.")
    return getattr(found, attribute)
