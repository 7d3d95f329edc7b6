"""Encoders that refuse rows of unsupported formats; they are sent to other processes, so they do not use torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from finetune.data.features import Outcome
from finetune.data.rows import Row
from finetune.errors import DataError
from finetune.runtime.files.recorded_names import recorded_as


@recorded_as("task.expecting.OnlyTurns")
@dataclass(frozen=True)
class RequireMessages:
    """Encodes rows with `messages`; the error of other rows advises how to map them."""

    encode: Callable[[Sequence[Row]], Sequence[Outcome]]

    def __call__(self, rows: Sequence[Row]) -> Sequence[Outcome]:
        """Return the features or the error of each row."""
        if any("messages" not in row for row in rows):  # all rows of a source have one format
            return [DataError(_no_messages(rows[0]))] * len(rows)
        if any(row.get("images") for row in rows):
            return [DataError(_WITH_IMAGES)] * len(rows)
        return self.encode(rows)


@recorded_as("task.expecting.PicturedTurns")
@dataclass(frozen=True)
class RequireImageMessages:
    """Encodes rows with `messages`, optionally with images."""

    encode: Callable[[Sequence[Row]], Sequence[Outcome]]

    def __call__(self, rows: Sequence[Row]) -> Sequence[Outcome]:
        """Return the features or the error of each row."""
        if any("messages" not in row for row in rows):
            return [DataError("the row has no turns. Write `messages`, or another format of turns.")] * len(rows)
        return self.encode(rows)


@recorded_as("task.expecting.OnlyText")
@dataclass(frozen=True)
class RequireText:
    """Encodes rows with only a text; the error of other rows advises how to map them."""

    encode: Callable[[Sequence[Row]], Sequence[Outcome]]
    task: str = "pretrain"

    def __call__(self, rows: Sequence[Row]) -> Sequence[Outcome]:
        """Return the features or the error of each row."""
        if any(row.keys() != {"text"} for row in rows):  # all rows of a source have one format
            content = "a label" if "label" in rows[0] else "turns"
            remedy = "Use task `sft`, or format `text`." if self.task == "pretrain" else "Set `format: text`."
            message = f"task `{self.task}` trains on plain text, but the row has {content}. {remedy}"
            return [DataError(message)] * len(rows)
        return self.encode(rows)


_WITH_IMAGES = (
    "the row has images, but this task only reads text. Write `task.name: vision_language_sft` with a model that "
    "reads images."
)


def _no_messages(row: Row) -> str:
    if "chosen" in row:
        return (
            "task `sft` trains on turns, but the row is a preference pair. To train on the chosen answer, "
            "set `format: prompt_completion` with `columns: {completion: chosen}`, or write a `template`."
        )
    if "label" in row:
        return (
            "task `sft` trains on turns, but the row is a labeled text. To train on the label as an answer, set "
            "`format: prompt_completion` with `template: {prompt: '{{ text }}', completion: '{{ label }}'}`."
        )
    return "task `sft` trains on turns, but the row is plain text. Use task `pretrain`, or another format."
