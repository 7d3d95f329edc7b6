"""Preference rows: several answers to one prompt as one sample, its sequences end to end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.data.encoding.conversation import ConversationEncoder
from finetune.data.features import LENGTHS_OF_SEQUENCES, Features, Outcome
from finetune.data.rows import Row
from finetune.data.turns import ARGUMENTS, Turn
from finetune.errors import DataError
from finetune.runtime.files.recorded_names import recorded_as

IS_GOOD = "is_good"
MARGIN = "margin"
_LARGEST_MARGIN = 1e38


@recorded_as("data.encoding.answers.AnswersEncoder")
@dataclass(frozen=True)
class PreferenceEncoder:
    """Encodes rows of a prompt with answers: `chosen` and `rejected`, or a `completion` that is judged.

    A sample's `input_ids` and `is_target` hold its sequences end to end, `sequence_lengths` says how long each is:
    chosen and rejected, or the one that is judged. Targets are the assistant's turns of the answers, each with its end.
    With `judged`, `is_good` says of each answer whether it is, and behind the answers stand as many more sequences:
    the prompt with the answers of the next row of the chunk (of the last row: those of the first), which do not belong
    to it. KTO takes its reference point from these.
    """

    encode: ConversationEncoder
    task: str
    judged: bool = False
    margin: bool = False

    def __call__(self, rows: Sequence[Row]) -> list[Outcome]:
        """Return the features of each row; None where an answer teaches nothing, or both answers are the same."""
        plans: list[_Plan | DataError] = []
        for place, row in enumerate(rows):
            try:
                partner = rows[(place + 1) % len(rows)] if self.judged else None
                plans.append(self._plan(row, partner))
            except DataError as error:
                plans.append(error)
        conversations = [each for plan in plans if isinstance(plan, _Plan) for each in plan.conversations]
        encoded = iter(self.encode(conversations))
        return [
            plan if isinstance(plan, DataError) else plan.outcome([next(encoded) for _ in plan.conversations])
            for plan in plans
        ]

    def _plan(self, row: Row, partner: Row | None) -> "_Plan":
        answers = self._answers(row)
        extra_arrays: dict[str, np.ndarray] = {}
        if self.judged:
            extra_arrays[IS_GOOD] = np.array([is_good for _, is_good in answers])
        if self.margin:
            extra_arrays[MARGIN] = _margin(row)
        sides = [side for side, _ in answers]
        if len(sides) > 1 and sides[0] == sides[1]:
            return _Plan((), extra_arrays)
        if partner is not None:
            others = [side for side, _ in self._answers(partner)]
            sides += [others[number % len(others)] for number in range(len(sides))]
        return _Plan(tuple(_conversation(row, side) for side in sides), extra_arrays)

    def _answers(self, row: Row) -> list[tuple[Sequence[Turn], bool]]:
        """Return the answers, and whether each is good; raises DataError for a row without any."""
        if "chosen" in row:
            return [(row["chosen"], True), (row["rejected"], False)]
        if "is_good" in row and self.judged:
            return [(row["completion"], row["is_good"])]
        raise DataError(
            f"{self.task} trains on pairs of answers, but the row is not a pair. Set `format: preference` with the "
            f"columns "
            f"`chosen` and `rejected`{' (or `format: judged`)' if self.judged else ''}, or use another task."
        )


@dataclass(frozen=True)
class _Plan:
    """The conversations that a sample consists of, and what else it holds; without any there is no target."""

    conversations: tuple[Row, ...]
    extra_arrays: Mapping[str, np.ndarray]

    def outcome(self, encoded: Sequence[Outcome]) -> Outcome:
        """Return the sample of these conversations, as encoded."""
        for each in encoded:
            if isinstance(each, DataError):
                return each
        sequences = [each for each in encoded if isinstance(each, Features) and each.num_targets > 0]
        if not sequences or len(sequences) < len(encoded):
            return None
        arrays = {name: np.concatenate([each.arrays[name] for each in sequences]) for name in sequences[0].arrays}
        lengths = np.array([each.length for each in sequences], np.int32)
        return Features(
            {**arrays, LENGTHS_OF_SEQUENCES: lengths, **self.extra_arrays},
            has_control_names=any(each.has_control_names for each in sequences),
            has_turn_marks=any(each.has_turn_marks for each in sequences),
            has_arguments=any(each.has_arguments for each in sequences),
            has_overrides=any(each.has_overrides for each in sequences),
            has_dropped_reasoning=any(each.has_dropped_reasoning for each in sequences),
        )


def _conversation(row: Row, answer: Sequence[Turn]) -> Row:
    """Return the prompt and an answer to it as one conversation; what the assistant says in the prompt is context."""
    conversation: dict[str, Any] = {
        "messages": [*row["prompt"], *answer],
        "num_context_turns": len(row["prompt"]),
    }
    return conversation | {name: row[name] for name in ("tools", ARGUMENTS) if row.get(name)}


def _margin(row: Row) -> np.ndarray:
    value = row.get("margin")
    if value is None:
        raise DataError(
            "has no `margin`, which `task.reward.use_margin` wants. Name its column with `columns: {margin: ...}`, or "
            "write `use_margin: false`."
        )
    if abs(value) > _LARGEST_MARGIN:
        raise DataError(f"has a `margin` of {value:g}; it must be at most {_LARGEST_MARGIN:g}.")
    return np.array([value], np.float32)
