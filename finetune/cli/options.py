"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Option("--config", metavar="JOB.yaml", help="The job file.")]

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Write one key over the file, such as train.learning_rate=1e-4. May be given again.",
    ),
]
