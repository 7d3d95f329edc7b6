"""Preference rows: several answers to one prompt as one sample of concatenated sequences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from finetune.data.encoding.conversation import ConversationEncoder
from finetune.data.features import LENGTHS_OF_SEQUENCES, Features, Findings, Outcome, result_or_error
from finetune.data.rows import ARGUMENTS, Row, Turn
from finetune.errors import DataError

IS_GOOD = "is_good"
MARGIN = "margin"
_LARGEST_MARGIN = 1e38


@dataclass(frozen=True)
class PreferenceEncoder:
    """Encodes rows of a prompt with answers: `chosen` and `rejected`, or a `completion` that is judged.

    A sample's `input_ids` and `is_target` hold its concatenated sequences, whose lengths are in `sequence_lengths`:
    chosen and rejected, or the judged completion. Targets are the assistant turns of the answers, including their end
    of turn. With `judged`, `is_good` has the verdict on each answer, and the answers are followed by as many mismatched
    sequences: the prompt with the answers of the next row of the chunk that has another prompt (the first follows the
    last). KTO takes its reference point from these. Where all rows of a chunk have the same prompt, they come from
    the next row, and the row is counted in `same_prompt_rows`.
    """

    encode: ConversationEncoder
    task: str
    judged: bool = False
    margin: bool = False

    def __call__(self, rows: Sequence[Row]) -> list[Outcome]:
        """Return the features of each row; None if an answer has no targets, or both answers are the same."""
        partners = _partners(rows) if self.judged else [None] * len(rows)
        plans = [result_or_error(self._plan, row, partner) for row, partner in zip(rows, partners, strict=True)]
        conversations = [
            conversation for plan in plans if isinstance(plan, _Plan) for conversation in plan.conversations
        ]
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
            value = row.get("margin")
            if value is None:
                raise DataError(
                    "has no `margin`, which `task.reward.use_margin` requires. Name its column with `columns: "
                    "{margin: ...}`, or write `use_margin: false`."
                )
            if abs(value) > _LARGEST_MARGIN:
                raise DataError(f"has a `margin` of {value:g}; it must be at most {_LARGEST_MARGIN:g}.")
            extra_arrays[MARGIN] = np.array([value], np.float32)
        sides = [side for side, _ in answers]
        if len(sides) > 1 and sides[0] == sides[1]:
            return _Plan((), extra_arrays)
        if partner is not None:
            others = [side for side, _ in self._answers(partner)]
            sides += [others[number % len(others)] for number in range(len(sides))]
        shared = {name: row[name] for name in ("tools", ARGUMENTS) if row.get(name)}
        conversations: tuple[Row, ...] = tuple(  # assistant turns of the prompt are context
            {"messages": [*row["prompt"], *side], "num_context_turns": len(row["prompt"]), **shared} for side in sides
        )
        has_same_prompt = partner is not None and _question(partner) == _question(row)
        return _Plan(conversations, extra_arrays, has_same_prompt=has_same_prompt)

    def _answers(self, row: Row) -> list[tuple[Sequence[Turn], bool]]:
        """Return the answers, and whether each is good; raises DataError for a row without answers."""
        if "chosen" in row:
            return [(row["chosen"], True), (row["rejected"], False)]
        if "is_good" in row and self.judged:
            return [(row["completion"], row["is_good"])]
        raise DataError(
            f"{self.task} trains on pairs of answers, but the row is not a pair. Set `format: preference` with the "
            f"columns `chosen` and `rejected`{' (or `format: judged`)' if self.judged else ''}, or use another task."
        )


def _question(row: Row) -> str:
    """Return what an answer of the row answers, as text that is equal for equal prompts and tools."""
    return repr((row.get("prompt"), row.get("tools")))


def _partners(rows: Sequence[Row]) -> list[Row]:
    """Return, for each row, the next one with another prompt; without one, the next row."""
    questions, num = [_question(row) for row in rows], len(rows)
    partners = [*range(1, 2 * num + 1)]  # of the rows twice in a row, so that the first follow the last
    for index in reversed(range(2 * num - 1)) if len(set(questions)) > 1 else ():
        if questions[(index + 1) % num] == questions[index % num]:
            partners[index] = partners[index + 1]
    return [rows[index % num] for index in partners[:num]]


@dataclass(frozen=True)
class _Plan:
    """The conversations of a sample and its further arrays; without conversations the row has no target."""

    conversations: tuple[Row, ...]
    extra_arrays: Mapping[str, np.ndarray]
    has_same_prompt: bool = False

    def outcome(self, encoded: Sequence[Outcome]) -> Outcome:
        """Return the sample of the encoded conversations."""
        for outcome in encoded:
            if isinstance(outcome, DataError):
                return outcome
        sequences = [outcome for outcome in encoded if isinstance(outcome, Features) and outcome.num_targets > 0]
        if not sequences or len(sequences) < len(encoded):
            return None
        arrays = {
            name: np.concatenate([sequence.arrays[name] for sequence in sequences]) for name in sequences[0].arrays
        }
        lengths = np.array([sequence.length for sequence in sequences], np.int32)
        found = Findings(frozenset({"same_prompt_rows"} if self.has_same_prompt else ()))
        own = sequences[: len(self.extra_arrays.get(IS_GOOD, sequences))]  # without the mismatched ones
        return Features(
            {**arrays, LENGTHS_OF_SEQUENCES: lengths, **self.extra_arrays},
            findings=reduce(Findings.plus, (sequence.findings for sequence in own), found),
        )
