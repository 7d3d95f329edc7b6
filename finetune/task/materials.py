"""What tasks are built from."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from finetune.config.sections.data import DataSection
from finetune.config.sections.task import TaskSection
from finetune.config.sections.train import LossKernel
from finetune.data.rows import Row


def no_rows() -> Iterable[Row]:
    """Return no rows."""
    return ()


@dataclass(frozen=True)
class Materials:
    """What a task may be built from. What a task needs and is not there is an error of ours, not the user's."""

    section: TaskSection
    data: DataSection
    tokenizer: Any = None  # a PreTrainedTokenizerBase; None for images alone
    processor: Any = None  # an image processor, or a processor of images and text; None for text alone
    rows: Callable[[], Iterable[Row]] = no_rows  # the training rows as their formats read them
    facts: Mapping[str, Any] | None = None  # what an earlier start of the run has read from the rows
    loss_kernel: LossKernel = "auto"
