"""`finetune plugins list` shows what is installed; `finetune plugins test` runs audit, parity and resume with one."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from finetune.commands.printing import print_facts
from finetune.config.load import load_config
from finetune.config.plugins import used_entries
from finetune.errors import FinetuneError, UserError
from finetune.registry.plugins import TABLES, distribution_text, entry_points, loaded_plugins, plugin_entries
from finetune.runtime.optional import lazily

with lazily(freeze=True):  # torch
    from finetune.commands import prepare
    from finetune.commands.verify import runs


def list_plugins(config: Path | None, overrides: Sequence[str]) -> None:
    """Print the entry points of installed distributions, which are not imported, and what a job imports."""
    installed = [(group, point) for group in TABLES for point in entry_points(group)]
    if not installed and config is None:
        print("no installed distribution has plugins; a job may name modules and files in `plugins`")
        return
    for group, point in installed:
        print(f"{group:<10}  {point.name}  {point.value}  {distribution_text(point)}")
        others = [distribution_text(each) for each in entry_points(group, point.name) if each != point]
        if others:
            print(f"  conflict: also in {', '.join(others)}; refused where a job uses it")
        if any(entry.name == point.name and not entry.plugin for table in TABLES[group] for entry in table):
            print("  conflict: a name of finetune, which is used in its place")
    if config is None:
        return
    loaded = load_config(config, overrides)
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


def test_plugin(
    name: str,
    config: Path,
    overrides: Sequence[str],
    *,
    strategies: Sequence[str],
    processes: int,
    steps: int,
    tolerance: float,
) -> bool:
    """Run audit, parity and resume on a job that uses the plugin, print their verdicts and return whether all passed.

    Raises UserError where the job does not use it.
    """
    loaded = load_config(config, overrides)
    used = [(group, entry) for group, entry in used_entries(loaded.config) if entry.name == name]
    if not used:
        names = ", ".join(entry.name for _, entry in used_entries(loaded.config)) or "no plugin"
        raise UserError(f"{config.name} does not use `{name}`; it uses {names}.")
    stop_at = max(1, steps // 2)
    parity = partial(runs.run_parity, strategies=strategies, processes=processes)
    resume = partial(
        runs.run_resume,
        stop_at=stop_at,
        source=f"{strategies[0]}:{processes}",
        target=f"{strategies[-1]}:{processes}",
    )
    results = {"audit": _passes(lambda: prepare.tokenize_data(loaded) is not None)}
    for title, check in {f"parity on {processes} processes": parity, f"resume after step {stop_at}": resume}.items():
        results[title] = _passes(partial(check, config, overrides=overrides, steps=steps, tolerance=tolerance))
    print(f"{used[0][0]} {name}, from {used[0][1].plugin}")
    print_facts(((title, "passed" if is_passed else "FAILED") for title, is_passed in results.items()), indent=28)
    return all(results.values())


def _passes(check: Callable[[], bool]) -> bool:
    """Return whether a check passes; the message of one that could not be completed is printed."""
    try:
        return check()
    except FinetuneError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return False
