"""`finetune plugins` and `finetune plugin test`: what other people's packages add."""

from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.exit_codes import handle_errors
from finetune.cli.options import Overrides
from finetune.runtime.optional import lazily

with lazily(freeze=True):
    from finetune.commands import plugins as plugins_command

Job = Annotated[Path | None, typer.Option("--config", metavar="JOB.yaml", help="A job that names plugins.")]

app = typer.Typer(help="Test a plugin.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def plugin() -> None:
    """Test a plugin."""


def add_to(main: typer.Typer) -> None:
    """Add the commands to the app."""
    main.command()(plugins)
    main.add_typer(app, name="plugin")


@handle_errors
def plugins(config: Job = None, override: Overrides = None) -> None:
    """List the plugins that are installed, from where, and conflicts; with --config also what the job imports.

    An installed plugin is imported only where a job names it. See docs/how-to/plugins.md.
    """
    plugins_command.list_plugins(config, override or [])


@app.command()
@handle_errors
def test(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name that the plugin adds.")],
    config: Job = None,
    strategies: Annotated[
        str, typer.Option(metavar="A,B", help="Accelerate files: names such as fsdp2, or paths.")
    ] = "ddp,fsdp2,zero2,zero3",
    processes: Annotated[int, typer.Option(min=1, help="Processes per strategy.")] = 2,
    steps: Annotated[int, typer.Option(min=2, help="Steps of each run.")] = 6,
    tolerance: Annotated[float, typer.Option(min=0.0, help="Maximum relative difference.")] = 1e-4,
    override: Overrides = None,
) -> int:
    """Test a plugin: audit of its rows, parity under several strategies, and a resume under another one.

    Without a job, on the recipe `quickstart` with the plugin in it. Exit code 1 unless everything passes.
    """
    names = tuple(word.strip() for word in strategies.split(",") if word.strip())
    request = plugins_command.PluginTest(names, processes, steps, tolerance)
    return 0 if plugins_command.test_plugin(name, config, override or [], request) else 1
