"""Encoders that refuse rows of a format which the task cannot train on; sent to other processes, so without torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from finetune.data.features import Outcome
from finetune.data.rows import Row
from finetune.errors import DataError
from finetune.runtime.recorded import recorded_as


@recorded_as("task.expecting.OnlyTurns")
@dataclass(frozen=True)
class RequireMessages:
    """Encodes rows of turns; others are told what to write so that they become such."""

    encode: Callable[[Sequence[Row]], Sequence[Outcome]]

    def __call__(self, rows: Sequence[Row]) -> Sequence[Outcome]:
        """Return what becomes of each row."""
        if any("messages" not in row for row in rows):  # all rows of a source have one format
            return [DataError(_no_messages(rows[0]))] * len(rows)
        if any(row.get("images") for row in rows):
            return [DataError(_WITH_IMAGES)] * len(rows)
        return self.encode(rows)


@recorded_as("task.expecting.PicturedTurns")
@dataclass(frozen=True)
class RequireImageMessages:
    """Encodes rows of turns, some of which may show images."""

    encode: Callable[[Sequence[Row]], Sequence[Outcome]]

    def __call__(self, rows: Sequence[Row]) -> Sequence[Outcome]:
        """Return what becomes of each row."""
        if any("messages" not in row for row in rows):
            return [DataError("the row has no turns. Write `messages`, or another format of turns.")] * len(rows)
        return self.encode(rows)


@recorded_as("task.expecting.OnlyText")
@dataclass(frozen=True)
class RequireText:
    """Encodes rows that are a text and nothing else; others are told what to write so that they become such."""

    encode: Callable[[Sequence[Row]], Sequence[Outcome]]
    task: str = "pretrain"

    def __call__(self, rows: Sequence[Row]) -> Sequence[Outcome]:
        """Return what becomes of each row."""
        if any(row.keys() != {"text"} for row in rows):  # all rows of a source have one format
            what = "a label" if "label" in rows[0] else "turns"
            instead = "Use task `sft`, or format `text`." if self.task == "pretrain" else "Set `format: text`."
            wrong = f"task `{self.task}` learns from plain text, but the row has {what}. {instead}"
            return [DataError(wrong)] * len(rows)
        return self.encode(rows)


_WITH_IMAGES = (
    "the row shows images, and this task reads text alone. Write `task.name: vision_language_sft` with a model that "
    "reads images."
)


def _no_messages(row: Row) -> str:
    if "chosen" in row:
        return (
            "task `sft` learns from turns, but the row is a preference pair. To learn from the answer that was chosen, "
            "set `format: prompt_completion` with `columns: {completion: chosen}`, or write a `template`."
        )
    if "label" in row:
        return (
            "task `sft` learns from turns, but the row is a labelled text. To learn to write the label, set `format: "
            "prompt_completion` with `template: {prompt: '{{ text }}', completion: '{{ label }}'}`."
        )
    return "task `sft` learns from turns, but the row is plain text. Use task `pretrain`, or another format."
