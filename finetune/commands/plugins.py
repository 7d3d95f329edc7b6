"""`finetune plugins list` shows what is installed; `finetune plugins test` runs audit, parity and resume with one."""

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.table import Table

from finetune.commands.init.init import make_recipe
from finetune.config.load import LoadedConfig, load_config
from finetune.config.plugins import used_entries
from finetune.errors import FinetuneError, UserError
from finetune.registry.plugins import TABLES, distribution_text, entry_points, loaded_plugins, plugin_entries
from finetune.runtime.optional import lazily
from finetune.runtime.text.rich_console import SafeConsole

with lazily(freeze=True):  # torch
    from finetune.commands import prepare
    from finetune.commands.verify import runs

RECIPE = "quickstart"
OVERRIDES = {
    "tasks": "task={{name: {name}}}",
    "losses": "task.loss={name}",
    "optimizers": "train.optimizer={{name: {name}}}",
    "schedules": "train.schedule={{name: {name}}}",
    "metrics": "evaluate.generate={{metrics: [{name}]}}",
    "templates": "data.chat_template={name}",
    "reporters": "report.reporters=[{name}]",
    "callbacks": "train.callbacks=[{name}]",
}
"""By group, what makes the recipe use an entry; rows of a source or a format need a job of their own."""


def list_plugins(config: Path | None, overrides: Sequence[str]) -> None:
    """Print the entry points of installed distributions, which are not imported, and what a job imports."""
    installed = [(group, point) for group in TABLES for point in entry_points(group)]
    if not installed and config is None:
        print("no installed distribution has plugins; a job may name modules and files in `plugins`")
        return
    cells = [(group, point.name, point.value, distribution_text(point)) for group, point in installed]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for (group, point), row in zip(installed, cells, strict=True):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        others = [distribution_text(each) for each in entry_points(group, point.name) if each != point]
        if others:
            print(f"  conflict: also in {', '.join(others)}; refused where a job uses it")
        if any(entry.name == point.name and not entry.plugin for table in TABLES[group] for entry in table):
            print("  conflict: a name of finetune, which is used in its place")
    if config is not None:
        _print_job(load_config(config, overrides))


def _print_job(loaded: LoadedConfig) -> None:
    used = {(group, entry.name) for group, entry in used_entries(loaded.config)}
    modules = {entry.plugin for _, entry in used_entries(loaded.config)}
    plugins = [
        plugin for plugin in loaded_plugins() if plugin.module in modules or plugin.name in loaded.config.plugins
    ]
    if not plugins:
        print(f"{loaded.path.name} uses no plugin")
    for plugin in plugins:
        print(f"{plugin.name}: {plugin.identity}")
        for group, entry in plugin_entries(plugin.module):
            print(f"  {group} {entry.name}{'' if (group, entry.name) in used else '  (not used by this job)'}")


@dataclass(frozen=True)
class PluginTest:
    """The checks of `finetune plugins test`."""

    strategies: tuple[str, ...]
    processes: int
    steps: int
    tolerance: float


def test_plugin(name: str, config: Path | None, overrides: Sequence[str], request: PluginTest) -> bool:
    """Run audit, parity and resume on a job that uses the plugin, print a table and return whether all passed.

    Without a job it is a recipe of the package, changed so that it uses the entry of an installed plugin. Raises
    UserError where the job does not use it.
    """
    with tempfile.TemporaryDirectory(prefix="finetune-plugin-") as folder:
        if config is None:
            groups = [group for group in TABLES if entry_points(group, name)]
            if not groups:
                raise UserError(
                    f"no installed plugin has `{name}`: see `finetune plugins list`, or give a job with --config."
                )
            if groups[0] not in OVERRIDES:
                raise UserError(f"`{name}` is in {groups[0]}, which need rows of their own: give a job with --config.")
            overrides = [*overrides, OVERRIDES[groups[0]].format(name=name)]
            config = make_recipe(RECIPE, Path(folder))[0]
        loaded = load_config(config, overrides)
        used = [(group, entry) for group, entry in used_entries(loaded.config) if entry.name == name]
        if not used:
            names = ", ".join(entry.name for _, entry in used_entries(loaded.config)) or "no plugin"
            raise UserError(f"{config.name} does not use `{name}`; it uses {names}.")
        stop_at = max(1, request.steps // 2)
        results = {
            "audit": _passes(partial(_audit, config, overrides)),
            f"parity on {request.processes} processes": _passes(
                lambda: runs.run_parity(
                    config,
                    overrides=overrides,
                    strategies=request.strategies,
                    processes=request.processes,
                    steps=request.steps,
                    tolerance=request.tolerance,
                )
            ),
            f"resume after step {stop_at}": _passes(
                lambda: runs.run_resume(
                    config,
                    overrides=overrides,
                    stop_at=stop_at,
                    steps=request.steps,
                    source=f"{request.strategies[0]}:{request.processes}",
                    target=f"{request.strategies[-1]}:{request.processes}",
                    tolerance=request.tolerance,
                )
            ),
        }
    table = Table(title=f"{used[0][0]} {name}, from {used[0][1].plugin}")
    for column in ("check", "verdict"):
        table.add_column(column)
    for title, verdict in results.items():
        table.add_row(title, verdict)
    SafeConsole().print(table)
    return all(verdict == PASSED for verdict in results.values())


PASSED = "passed"


def _audit(config: Path, overrides: Sequence[str]) -> bool:
    prepare.prepare(config, overrides)
    return True


def _passes(check: Callable[[], bool]) -> str:
    """Return the verdict of a check; the message of one that could not be completed is printed."""
    try:
        return PASSED if check() else "FAILED"
    except FinetuneError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return "FAILED: see the error above"
