"""Imports the plugins of a job before it is validated, so that their names and options are known."""

import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from finetune.config.formatting import format_list
from finetune.config.run_config import RunConfig
from finetune.config.schema import run_schema
from finetune.config.section import Section, join_key
from finetune.errors import Problem, RegistryError
from finetune.registry import plugins
from finetune.registry.formats import FORMATS, SOURCES, TEMPLATES
from finetune.registry.losses import PREFERENCE_LOSSES, TOKEN_LOSSES
from finetune.registry.observers import CALLBACKS, REPORTERS
from finetune.registry.optimizers import OPTIMIZERS, SCHEDULES
from finetune.registry.table import Entry, Table, use_options
from finetune.registry.tasks import METRICS, TASKS

NAMED_BY: tuple[tuple[str, str, Table[Any]], ...] = (
    ("task.name", "tasks", TASKS),
    ("task.loss", "losses", TOKEN_LOSSES),
    ("task.preference.loss", "losses", PREFERENCE_LOSSES),
    ("train.optimizer.name", "optimizers", OPTIMIZERS),
    ("train.schedule.name", "schedules", SCHEDULES),
    ("train.callbacks.*", "callbacks", CALLBACKS),
    ("report.reporters.*", "reporters", REPORTERS),
    ("evaluate.generate.metrics.*", "metrics", METRICS),
    ("data.chat_template", "templates", TEMPLATES),
    ("data.train.source", "sources", SOURCES),
    ("data.train.mix.*.source", "sources", SOURCES),
    ("data.validation.source", "sources", SOURCES),
    ("data.train.format", "formats", FORMATS),
    ("data.train.mix.*.format", "formats", FORMATS),
    ("data.validation.format", "formats", FORMATS),
)
"""The keys that name an entry which a plugin may have added, with the group and the table; `*`: each item of a list."""

WATCHING = ("callbacks", "reporters", "metrics")
"""Groups of plugins that do not change a training step."""

PLUGIN_PREFIX = "plugins."
"""Prefix of the names of plugins' digests in checkpoints: `plugins.my_loss`."""


def load_plugins(values: Mapping[str, Any], folder: pathlib.Path) -> list[Problem]:
    """Import the plugins that a job names, or whose entries it names; return the problems.

    An entry that no table has is looked for among the entry points of installed distributions.
    """
    problems: list[Problem] = []
    named: set[str] = set()
    written = values.get("plugins")
    for number, name in enumerate(written if isinstance(written, list) else ()):
        if isinstance(name, str):
            try:
                named |= {plugin.module for plugin in plugins.load_plugin(name, folder)}
            except RegistryError as error:
                problems.append(Problem(f"plugins.{number}", str(error)))
    for key, name, group, table in () if problems else _named_entries(values):
        if name in table and table[name].plugin in {"", *named}:
            continue
        points = [] if name in table and not table[name].plugin else plugins.entry_points(group, name)
        if len(points) > 1:
            origins = format_list(f"{point.value} of {plugins.distribution_text(point)}" for point in points)
            message = f"several installed plugins have a {table.title} `{name}`: {origins}. Uninstall all but one."
            problems.append(Problem(key, message))
        elif points:
            try:
                plugin = plugins.load_entry_point(points[0])
            except RegistryError as error:
                problems.append(Problem(key, str(error)))
                continue
            named.add(plugin.module)
            if name not in table:
                message = f"`{points[0].value}`, imported for it, registers no {table.title} `{name}`. Tell its author."
                problems.append(Problem(key, message))
        elif name in table and any(plugin.module == table[name].plugin for plugin in plugins.loaded_plugins()):
            plugin_name = plugins.plugin_of(table[name]).name
            message = f"it is from a plugin that this job does not name. Add `plugins: [{plugin_name}]`."
            problems.append(Problem(key, message))
    run_schema.cache_clear()
    return problems


TRUSTED_VARIABLE = "FINETUNE_PLUGINS"


def untrusted_plugins(values: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each plugin that the config of a run folder names and that its reader has not allowed.

    Allowed are installed distributions that declare plugins, and modules that the variable FINETUNE_PLUGINS names.
    """
    written = values.get("plugins")
    names = [name for name in written if isinstance(name, str)] if isinstance(written, list) else []
    if not names:
        return []
    declared = [point for group in plugins.TABLES for point in plugins.entry_points(group)]
    trusted = {
        *os.environ.get(TRUSTED_VARIABLE, "").split(os.pathsep),
        *(name for point in declared for name in (point.module, plugins.distribution_text(point).partition(" ")[0])),
    }
    message = "a run folder names this code, which is not imported for that. If you trust it, set {}={}."
    return [
        Problem(f"plugins.{number}", message.format(TRUSTED_VARIABLE, name))
        for number, name in enumerate(names)
        if name not in trusted
    ]


def _named_entries(values: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Table[Any]]]:
    """Yield key, name, group and table of each name of an entry in the values."""
    for pattern, group, table in NAMED_BY:
        items: list[tuple[str, Any]] = [("", values)]
        for part in pattern.split("."):
            inner: list[tuple[str, Any]] = []
            for key, value in items:
                if part == "*" and isinstance(value, list | tuple):
                    inner += [(join_key(key, number), item) for number, item in enumerate(value)]
                elif isinstance(value, dict) and part in value:
                    inner.append((join_key(key, part), value[part]))
            items = inner
        yield from ((key, name, group, table) for key, name in items if isinstance(name, str))


def used_entries(config: RunConfig) -> list[tuple[str, Entry]]:
    """Return the entries of plugins that the job uses, with their groups."""
    named = _named_entries(config.model_dump(exclude={"plugin_options"}))
    used = {(group, name): table[name] for _, name, group, table in named if name in table and table[name].plugin}
    return [(group, entry) for (group, _), entry in used.items()]


def plugin_identities(config: RunConfig) -> tuple[dict[str, str], dict[str, str]]:
    """Return version and digest of the plugins that change the training, and of plugins that only observe it, by name.

    A module without entries, which may change anything, is one of the first.
    """
    trained: dict[str, str] = {}
    watching: dict[str, str] = {}
    for group, entry in used_entries(config):
        identities = watching if group in WATCHING else trained
        identities[f"{PLUGIN_PREFIX}{entry.name}"] = plugins.plugin_of(entry).identity
    for plugin in plugins.loaded_plugins():
        if plugin.name in config.plugins and not plugin.entries:  # it may change anything
            trained[f"{PLUGIN_PREFIX}{plugin.module}"] = plugin.identity
    return trained, watching


def missing_options(config: RunConfig) -> list[Problem]:
    """Return a problem for each used entry that has required options but no section in `plugin_options`."""
    return [
        Problem(
            f"plugin_options.{entry.name}",
            f"the section is missing: the options of `{entry.name}`. It needs {format_list(required)}.",
        )
        for _, entry in used_entries(config)
        if entry.options is not None and getattr(config.plugin_options, entry.name, None) is None
        if (required := [name for name, field in entry.options.model_fields.items() if field.is_required()])
    ]


def activate_options(section: Section | None) -> None:
    """Set the options with which the entries of plugins are called: `plugin_options` of a job."""
    names = type(section).model_fields if section is not None else ()
    use_options({name: value for name in names if (value := getattr(section, name)) is not None})
