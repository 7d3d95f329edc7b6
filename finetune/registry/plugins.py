"""Plugins: modules of other people that add entries to the tables.

A plugin is imported when a job names it: its module, its file or its distribution in `plugins`, or one of its entries
by a name that an installed distribution declares as an entry point. Nothing is imported because it is installed.
"""

import hashlib
import importlib
import importlib.util
import os
import pathlib
import stat
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata
from itertools import chain
from typing import Any

from finetune.errors import RegistryError
from finetune.registry.formats import FORMATS, SOURCES, TEMPLATES
from finetune.registry.layouts import LAYOUTS
from finetune.registry.losses import PREFERENCE_LOSSES, TOKEN_LOSSES
from finetune.registry.observers import CALLBACKS, REPORTERS
from finetune.registry.optimizers import OPTIMIZERS, SCHEDULES
from finetune.registry.table import Entry, Table, options_of
from finetune.registry.tasks import METRICS, TASKS
from finetune.registry.turns import ROLES

TABLES: Mapping[str, tuple[Table[Any], ...]] = {
    "tasks": (TASKS,),
    "optimizers": (OPTIMIZERS,),
    "schedules": (SCHEDULES,),
    "losses": (TOKEN_LOSSES, PREFERENCE_LOSSES),
    "metrics": (METRICS,),
    "sources": (SOURCES,),
    "formats": (FORMATS,),
    "layouts": (LAYOUTS,),
    "templates": (TEMPLATES,),
    "roles": (ROLES,),
    "reporters": (REPORTERS,),
    "callbacks": (CALLBACKS,),
}
"""The tables to which plugins add, by the group of entry points: `tasks` is the group `finetune.tasks`."""

_PACKAGE = pathlib.Path(__file__).parents[1]
_MAX_FILES = 2_000
"""Python files of one package that are digested."""


@dataclass(frozen=True)
class Plugin:
    """A module that adds entries, and its origin."""

    name: str  # as the job names it: a module, or the absolute path of a file
    module: str  # its name in Python
    file: str
    digest: str  # of its Python files
    distribution: str = ""  # `my-package 1.2`; empty for a file
    entries: tuple[tuple[str, str], ...] = field(default=(), compare=False)  # group and name

    @property
    def identity(self) -> str:
        """Return version and digest of the sources, which a checkpoint remembers."""
        return f"{self.distribution or pathlib.Path(self.file).name} sha256 {self.digest[:16]}"


_loaded: dict[str, Plugin] = {}  # by module, in the order in which they were imported
_importing: list[str] = []  # modules, the innermost last


def loaded_plugins() -> tuple[Plugin, ...]:
    """Return the plugins that this process has imported."""
    return tuple(_loaded.values())


def plugin_of(entry: Entry) -> Plugin:
    """Return the plugin that has added the entry: one that a job names, or a module that a script has imported."""
    return _loaded[entry.plugin] if entry.plugin in _loaded else _describe(entry.plugin, name=entry.plugin)


def importing_module(default: str) -> str:
    """Return the module of the plugin that is being imported, to which a new entry belongs."""
    return _importing[-1] if _importing else default


def plugin_entries(module: str | None = None) -> Iterator[tuple[str, Entry]]:
    """Yield the entries that plugins, or the plugin of this module, have added, each with its group."""
    for group, tables in TABLES.items():
        of_plugins = (entry for table in tables for entry in table if entry.plugin)
        yield from ((group, entry) for entry in of_plugins if module in (None, entry.plugin))


def code_identity(entry: Entry) -> list[str]:
    """Return what identifies the code and the options of a plugin's entry in caches; empty for this package's own."""
    if not entry.plugin:
        return []
    options = "" if entry.options is None else options_of(entry).model_dump_json()
    return [plugin_of(entry).digest, options]


def load_plugin(name: str, folder: pathlib.Path) -> tuple[Plugin, ...]:
    """Import the module, the file (relative to the folder) or all entry points of the distribution of that name.

    Raises RegistryError, with the line of the plugin that failed, if it cannot be imported.
    """
    if name.startswith((".", "/", "~")):
        return (_load_file(folder / pathlib.Path(name).expanduser()),)
    try:
        is_module = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        is_module = False
    if is_module:
        return (_load_module(name, name=name),)
    points = [point for group in TABLES for point in entry_points(group) if _distribution_name(point) == name]
    if points:
        return tuple(dict.fromkeys(load_entry_point(point) for point in points))
    hint = f" A file begins with `./`: `./{name}`." if name.endswith(".py") else ""
    raise RegistryError(
        f"`{name}` is neither a module that can be imported here nor an installed distribution with plugins.{hint} "
        "`finetune plugins list` shows the installed ones."
    )


def entry_points(group: str, name: str | None = None) -> list[metadata.EntryPoint]:
    """Return what installed distributions declare in the group `finetune.GROUP`, or under a name in it, once each."""
    found = metadata.entry_points(group=f"finetune.{group}")
    chosen = [point for point in found if name is None or point.name == name]
    unique = {(point.name, _distribution_name(point), point.value): point for point in chosen}
    return [unique[key] for key in sorted(unique)]


def load_entry_point(point: metadata.EntryPoint) -> Plugin:
    """Import the module of the entry point; raises RegistryError as `load_plugin`."""
    return _load_module(point.module, name=point.module, distribution=distribution_text(point))


def distribution_text(point: metadata.EntryPoint) -> str:
    """Return name and version of the distribution that declares the entry point."""
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unknown distribution"


def _distribution_name(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else ""


def load_again(plugins: Sequence[Plugin]) -> None:
    """Import the plugins of the process that has started this one."""
    for plugin in plugins:
        load_plugin(plugin.name, pathlib.Path("/"))


def _load_file(path: pathlib.Path) -> Plugin:
    path = pathlib.Path(os.path.normpath(path))
    try:
        is_regular = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        raise RegistryError(f"{path} cannot be read: {error.strerror}. Write the path of a Python file.") from error
    if not is_regular or path.suffix != ".py":
        raise RegistryError(f"{path} is not a regular file that ends with `.py`. Write the path of a Python file.")
    module = f"finetune_plugin_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}_{path.stem}"
    digest = _digest([path], path.parent)
    if module in _loaded and _loaded[module].digest == digest:
        return _loaded[module]
    specification = importlib.util.spec_from_file_location(module, path)
    assert specification is not None and specification.loader is not None, "it ends with .py"
    imported = importlib.util.module_from_spec(specification)
    sys.modules[module] = imported  # so that its classes and functions can be pickled
    with _adding_entries(module, str(path)):
        specification.loader.exec_module(imported)
    return _enter(Plugin(str(path), module, str(path), digest))


def _load_module(module: str, *, name: str, distribution: str = "") -> Plugin:
    if module in _loaded:
        return _loaded[module]
    if module not in sys.modules:  # a script may have imported it
        with _adding_entries(module, module):
            importlib.import_module(module)
    return _enter(_describe(module, name=name, distribution=distribution))


def _describe(module: str, *, name: str, distribution: str = "") -> Plugin:
    """Return the plugin of a module that is imported, with the digest of its whole package."""
    file = getattr(sys.modules[module], "__file__", None) or ""
    package = sys.modules[module.partition(".")[0]]
    folders = [pathlib.Path(folder) for folder in getattr(package, "__path__", ())]
    files = sorted(each for folder in folders for each in folder.rglob("*.py"))[:_MAX_FILES] or [pathlib.Path(file)]
    root = folders[0] if folders else pathlib.Path(file).parent
    if not distribution:
        names = metadata.packages_distributions().get(module.partition(".")[0], ())
        distribution = f"{names[0]} {metadata.version(names[0])}" if names else ""
    return Plugin(name, module, file, _digest(files, root), distribution)


@contextmanager
def _adding_entries(module: str, title: str) -> Iterator[None]:
    """Import a plugin: its entries are the module's; if it fails, none of them stays."""
    _remove_entries(module)
    _importing.append(module)
    try:
        yield
    except (Exception, SystemExit) as error:
        sys.modules.pop(module, None)
        _loaded.pop(module, None)
        _remove_entries(module)
        raise RegistryError(f"`{title}` cannot be imported: {_reason(error)} Correct it, or remove it.") from error
    finally:
        _importing.pop()


def _remove_entries(module: str) -> None:
    for table in chain.from_iterable(TABLES.values()):
        table.remove_plugin(module)


def _reason(error: BaseException) -> str:
    """Return what failed and the last line outside of this package and of Python's import that led to it."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and not pathlib.Path(frame.filename).is_relative_to(_PACKAGE)
    ]
    where, line = (frames[-1].filename, frames[-1].lineno) if frames else ("", None)
    if isinstance(error, SyntaxError) and error.filename:
        where, line = error.filename, error.lineno
    text = str(error.msg if isinstance(error, SyntaxError) else error).strip().rstrip(".")
    reason = text if isinstance(error, RegistryError) else f"{type(error).__name__}{f': {text}' if text else ''}"
    return f"{reason} ({where}, line {line})." if where else f"{reason}."


def _enter(plugin: Plugin) -> Plugin:
    entries = tuple((group, entry.name) for group, entry in plugin_entries(plugin.module))
    _loaded[plugin.module] = replace(plugin, entries=entries)
    return _loaded[plugin.module]


def _digest(files: Sequence[pathlib.Path], folder: pathlib.Path) -> str:
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes() if file.is_file() else b""
        digest.update(f"{os.path.relpath(file, folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()
