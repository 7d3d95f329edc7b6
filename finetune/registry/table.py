"""Registry tables: entries that a job selects by name, with their properties and the path of their implementation.

An entry is added with `register`, by this package or a plugin. Code that needs a property of an optimizer, a task or a
loss reads it from the entry; no other module keeps lists of names.
"""

import difflib
import importlib
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from finetune.errors import RegistryError

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An entry that a job selects by name. Raises RegistryError if it is invalid.

    `description` follows the name on the reference page. `implementation` is `package.module:attribute`, imported on
    first use; empty if the entry has no code. A job cannot select an internal entry. `options` is the section with the
    keys that a plugin's entry has in `plugin_options`, under its name; the implementation is then called with the
    argument `options`, in addition to the table's arguments.
    """

    name: str
    description: str = ""
    implementation: str = ""
    is_internal: bool = False
    plugin: str = ""  # the module that has added it; empty for entries of this package
    options: Any = None  # a class of section, or None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise RegistryError(f"`{self.name}`: a name consists of lowercase letters, digits and underscores.")
        if self.implementation and not _PATH.fullmatch(self.implementation):
            raise RegistryError(f"{self.name}: `{self.implementation}` is not of the form package.module:attribute.")


EntryType = TypeVar("EntryType", bound=Entry)


class Table(Generic[EntryType]):
    """Entries by name, in order of registration."""

    def __init__(self, title: str, entry_type: type[EntryType], entries: Iterable[EntryType] = ()) -> None:
        """`title` is the word for an entry in messages, such as `optimizer`."""
        self.title = title
        self._entry_type = entry_type
        self._entries: dict[str, EntryType] = {}
        for entry in entries:
            self.register(entry)

    def register(self, entry: EntryType) -> None:
        """Add the entry; raises RegistryError if its type is wrong or its name is taken."""
        if not isinstance(entry, self._entry_type):
            expected = self._entry_type.__name__
            raise RegistryError(f"{self.title} `{entry.name}`: is a {type(entry).__name__}, not a {expected}.")
        if (other := self._entries.get(entry.name)) is not None:
            raise RegistryError(
                f"{self.title} `{entry.name}`: the name is taken by {other.implementation or 'an entry without code'}, "
                f"so {entry.implementation or 'another entry'} cannot have it. Rename one of them."
            )
        self._entries[entry.name] = entry

    def remove_plugin(self, module: str) -> None:
        """Remove the entries that this module of a plugin has added."""
        self._entries = {name: entry for name, entry in self._entries.items() if entry.plugin != module}

    def __getitem__(self, name: str) -> EntryType:
        """Return the entry; raises RegistryError with the closest match for an unknown name."""
        if name in self._entries:
            return self._entries[name]
        near = difflib.get_close_matches(name, self._entries, n=1)
        hint = f"Did you mean `{near[0]}`?" if near else f"Known are {', '.join(self._entries)}."
        raise RegistryError(f"there is no {self.title} `{name}`. {hint}")

    def get(self, name: str) -> EntryType | None:
        """Return the entry; None for an unknown name."""
        return self._entries.get(name)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[EntryType]:
        return iter(self._entries.values())

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the names that a job can select."""
        return tuple(entry.name for entry in self if not entry.is_internal)

    def resolve(self, name: str) -> Any:
        """Import and return the implementation of the entry, with the options of the job if it has any."""
        entry = self[name]
        implementation = import_attribute(entry.implementation)
        return implementation if entry.options is None else partial(implementation, options=options_of(entry))

    def refusal(self, name: str, returned: object, expected: str) -> RegistryError:
        """Return the error for an entry that has returned something else than what its table promises.

        `returned` is the value, or its description where that is text that begins with `a ` or `an `.
        """
        is_described = isinstance(returned, str) and returned.startswith(("a ", "an "))
        shown = returned if is_described else f"`{reprlib.repr(returned)}` of type `{type(returned).__name__}`"
        entry = self.get(name)
        origin = f" of the plugin {entry.plugin}" if entry is not None and entry.plugin else ""
        return RegistryError(f"the {self.title} `{name}`{origin} returned {shown}. It must return {expected}.")

    def describe(self) -> str:
        """Return the names that a job can select with their descriptions, for the reference page."""
        entries = [self[name] for name in self.choices]
        return " ".join(f"`{entry.name}`{entry.description and f': {entry.description}'}." for entry in entries)


_option_values: dict[str, Any] = {}
"""The validated `plugin_options` of the job that this process works on, by name of the entry."""


def use_options(values: Mapping[str, Any]) -> None:
    """Make these the options of plugins from now on: of the job that was loaded last, or that is trained."""
    _option_values.clear()
    _option_values.update(values)


def options_in_use() -> Mapping[str, Any]:
    """Return the options of plugins that are in use."""
    return dict(_option_values)


def options_of(entry: Entry) -> Any:
    """Return the section with the options of the entry; its defaults if the job has none."""
    value = _option_values.get(entry.name)
    return value if isinstance(value, entry.options) else entry.options()


def import_attribute(path: str) -> Any:
    """Return the object at `package.module:attribute`; raises RegistryError if the module does not define it."""
    module_name, _, attribute = path.partition(":")
    module = importlib.import_module(module_name)
    if not hasattr(module, attribute):
        raise RegistryError(f"{path}: the module has no `{attribute}`.")
    return getattr(module, attribute)
