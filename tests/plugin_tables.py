"""Tests load plugins into tables of the whole process, and take them out again."""

import sys

from finetune.registry import plugins
from finetune.registry.table import use_options


def unload_plugins() -> None:
    """Forget the plugins that jobs have loaded, their entries and their options."""
    for module in (*plugins._loaded, *{entry.plugin for _, entry in plugins.plugin_entries()}):
        for tables in plugins.TABLES.values():
            for table in tables:
                table.remove_plugin(module)
        plugins._loaded.pop(module, None)
        sys.modules.pop(module, None)
    use_options({})
