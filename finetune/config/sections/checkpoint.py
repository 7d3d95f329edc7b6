"""`checkpoint:` - when the run saves itself, what it keeps, and where it continues."""

from typing import Annotated, Literal

from pydantic import Field

from finetune.config.section import Path, Positive, Section, key


class CheckpointSection(Section):
    """When the run saves itself, what it keeps, and where it continues."""

    every_steps: Positive | None = key("Save every so many steps; unset, only at the end.", None)
    keep_last: Annotated[int, Field(ge=2)] = key(
        "Newest checkpoints to keep; at least 2, as the last may be the one being written.", 2
    )
    resume: Literal["auto", "never"] | Path = key(
        "`auto`: from the newest valid checkpoint of `run.folder`, or from the start when there is none. "
        "`never`: refuse a folder that has checkpoints. Otherwise the path of a checkpoint.",
        "auto",
    )
