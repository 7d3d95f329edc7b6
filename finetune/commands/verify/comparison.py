"""Compares the answers of an engine with the expected ones; every problem is a sentence."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from finetune.commands.verify.expected import ExpectedAnswer, RowScores, ServedAnswer
from finetune.export.verify.verifier import LIMITS, tolerance

_MAX_NAMED = 3
_LIKELY_FACTOR = 4.0
"""A token's log-probability may differ by more than the typical error of the logits, as one of many in a row."""

_ROUNDING_FACTORS = {"median": 2.0, "worst": 4.0}
"""How far an engine's errors may exceed transformers' in the same dtype: other kernels round elsewhere."""

_EXACT = 2e-6
"""The error of a log-probability in float32 itself."""

_EFFECT = 0.05
"""How far the measured part of the training's effect may be from 1, in addition to what rounding explains."""


@dataclass
class EngineComparison:
    """The results so far: problems, the measurements of the JSON file, and their lines on the screen."""

    problems: list[str] = field(default_factory=list)
    measurements: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)

    def compare_ids(
        self, title: str, inputs: Sequence[str], expected: Sequence[Sequence[int]], served: Sequence[Any]
    ) -> None:
        """Compare the tokens of each input; the engine's are None if it does not offer them."""
        if not inputs or served[0] is None:
            return
        differences = [
            f"{_shortened(text)}: {_first_difference(list(wanted), list(actual))}"
            for text, wanted, actual in zip(inputs, expected, served, strict=True)
            if list(wanted) != list(actual)
        ]
        num_inputs = len(inputs)
        self.measurements[title] = {"compared": num_inputs, "different": len(differences)}
        self.lines.append(f"{title}: {num_inputs - len(differences)} of {num_inputs} with the same tokens")
        if differences:
            self.problems.append(
                f"it tokenizes {len(differences)} of {num_inputs} {title} differently:\n    "
                + "\n    ".join(differences[:_MAX_NAMED])
            )

    def compare_stops(self, names: Mapping[int, str], served: Mapping[int, bool | None]) -> None:
        """Compare the tokens that end an answer; `names` are the expected ones."""
        if None in served.values():
            return
        ids = [f"{name} ({token})" for token, name in names.items()]
        missing = [f"{name} ({token})" for token, name in names.items() if not served[token]]
        extra = [str(token) for token, ends in served.items() if ends and token not in names]
        self.lines.append(f"answers end at {', '.join(name for name in ids if name not in missing) or 'no such token'}")
        self.measurements["stop ids"] = {"expected": ids, "missing": missing, "not expected": extra}
        if missing:
            self.problems.append(
                f"an answer does not end at {', '.join(missing)}, as it did in training, so answers run on. Its "
                "generation config lacks the id: copy generation_config.json of the folder."
            )
        if extra:
            self.problems.append(f"an answer ends at the token {', '.join(extra)}, which is an ordinary one.")

    def compare_scores(
        self, expected: Sequence[RowScores], served: Sequence[Sequence[float]], *, limits: "Limits"
    ) -> Tensor:
        """Compare log-probabilities, and return the differences, one for each token."""
        values = torch.cat([row.log_probabilities for row in expected])
        actual = torch.cat([torch.tensor(row, dtype=torch.float32) for row in served])
        differences = actual - values
        if not bool(torch.isfinite(differences).all()):
            self.problems.append("its log-probabilities are not finite.")
            return torch.nan_to_num(differences)
        parts = differences.abs() / limits.worst
        median = float(differences.abs().median())
        position = int(parts.argmax())
        worst, allowed = float(differences.abs()[position]), float(limits.worst.max())
        counts = {"rows": len(expected), "tokens": len(values)}
        sizes = {"median": median, "worst": worst, "allowed": allowed, "allowed median": limits.median}
        self.measurements["log-probabilities"] = {**counts, **sizes, "dtype": limits.dtype}
        self.lines.append(
            f"log-probabilities of {len(values):,} tokens in {len(expected)} rows: {median:.1e} in the median, "
            f"{worst:.1e} at worst ({allowed:.1e} allowed, {limits.dtype})"
        )
        if float(parts.max()) > 1 or median > limits.median:
            hint = ""
            if limits.half and limits.median < median <= limits.half["bfloat16"]:
                hint = (
                    " The size is that of a lower precision: give the engine's with --dtype, or start it with float32."
                )
            rows = torch.tensor([number for number, row in enumerate(expected) for _ in row.log_probabilities])
            self.problems.append(
                f"its log-probabilities differ by {median:.2g} in the median and up to "
                f"{float(differences.abs().max()):.2g} (in row {int(rows[position]) + 1}); rounding in {limits.dtype} "
                f"explains {limits.median:.2g} and {float(limits.worst[position]):.2g}, exceeded in "
                f"{len(set(rows[parts > 1].tolist()))} of {len(expected)} rows.{hint}"
            )
        return differences

    def compare_effect(
        self, expected: Sequence[RowScores], base: Sequence[RowScores], differences: Tensor, *, limits: "Limits"
    ) -> None:
        """Compare how far the served model is from the base with how far training has moved it."""
        effect = torch.cat([row.log_probabilities for row in expected]) - torch.cat(
            [row.log_probabilities for row in base]
        )
        size = float(effect.pow(2).mean().sqrt())
        if size <= _EXACT:
            self.problems.append("the folder's model has the log-probabilities of its base: training changed nothing.")
            return
        part = 1 + float((differences * effect).mean()) / size**2
        self.measurements["effect of training"] = {"size": size, "served part": part}
        self.lines.append(f"effect of training: {part:.3f} of {size:.2g}")
        if abs(part - 1) > _EFFECT + limits.median / size:
            self.problems.append(
                f"it changes the base's log-probabilities by {part:.2f} of what training changed"
                + (": the adapter is not applied." if abs(part) < _EFFECT else ": a part of the adapter is missing.")
            )

    def compare_answers(
        self,
        expected: Sequence[ExpectedAnswer],
        served: Sequence[ServedAnswer],
        *,
        num_tokens: Sequence[int],
        limits: "Limits",
    ) -> None:
        """Compare greedy answers; where two tokens were nearly as likely, rounding may choose the other one."""
        counts = {"same": 0, "chosen by rounding": 0, "different": 0}
        margin = max(float(limits.worst.max()), 1e-4)
        differences = []
        for number, (answer, actual) in enumerate(zip(expected, served, strict=True)):
            length = num_tokens[number]
            if actual.num_prompt_tokens not in (None, length):
                differences.append(f"prompt {number + 1} has {actual.num_prompt_tokens} tokens instead of {length}")
            outcome, text = _compare_answer(answer, actual, margin=2 * margin)
            counts[outcome] += 1
            if text:
                differences.append(f"answer {number + 1} {text}")
            num_compared = 1
            if outcome == "same":  # special tokens and invalid bytes are not seen in the text
                steps = enumerate(pairwise(answer.prefixes))
                unseen = (n for n, (before, after) in steps if before == after or "\ufffd" in after)
                num_compared += next(unseen, len(answer.tokens))
            pairs = zip(answer.log_probabilities, actual.log_probabilities[:num_compared], strict=False)
            errors = [abs(one - other) for one, other in pairs]
            if errors and not max(errors) <= margin:
                position = errors.index(max(errors))
                differences.append(
                    f"token {position + 1} of answer {number + 1} has the log-probability "
                    f"{actual.log_probabilities[position]:.4f} instead of {answer.log_probabilities[position]:.4f}"
                )
        self.measurements["answers"] = counts
        self.lines.append("greedy answers: " + ", ".join(f"{number} {name}" for name, number in counts.items()))
        if differences:
            self.problems.append("greedy answers differ:\n    " + "\n    ".join(differences[: 2 * _MAX_NAMED]))


@dataclass(frozen=True)
class Limits:
    """The differences that rounding explains: for each token, and for the median."""

    worst: Tensor
    median: float
    dtype: str
    half: Mapping[str, float] = field(default_factory=dict)  # medians of lower dtypes, to recognize them


def limits_of(expected: Sequence[RowScores], rounded: Sequence[RowScores] | None, *, dtype: str, depth: int) -> Limits:
    """Return the limits in a dtype: from the depth in float32, otherwise from the model's own scores in that dtype."""
    deviations = torch.cat([row.deviations for row in expected])
    if rounded is None:
        limit = tolerance("float32", num_layers=depth, of="").limit
        worst = _LIKELY_FACTOR * limit * deviations + _EXACT
        likely = {name: float(deviations.median()) * LIMITS[name] for name in ("float16", "bfloat16")}
        return Limits(worst, float(worst.median()), "float32", likely)
    values = torch.cat([row.log_probabilities for row in expected])
    errors = (torch.cat([row.log_probabilities for row in rounded]) - values).abs()
    worst = torch.full_like(errors, _ROUNDING_FACTORS["worst"] * float(errors.max()) + _EXACT)
    return Limits(worst, _ROUNDING_FACTORS["median"] * float(errors.median()) + _EXACT, dtype)


def _compare_answer(expected: ExpectedAnswer, served: ServedAnswer, *, margin: float) -> tuple[str, str]:
    texts, actual = [_comparable(prefix) for prefix in expected.prefixes], _comparable(served.text)
    if texts[-1] == actual and not (expected.is_complete and not served.is_complete):
        return "same", ""
    if expected.is_complete and texts[-1] and actual.startswith(texts[-1]):
        return "different", f"does not end after {_shortened(texts[-1])}"
    common = max(number for number, text in enumerate(texts) if actual.startswith(text))
    first = texts.index(texts[common])  # tokens that only together are a character come after it
    if min(expected.margins[first : common + 1], default=math.inf) <= margin:
        return "chosen by rounding", ""
    return "different", f"is {_shortened(actual)} instead of {_shortened(texts[-1])}, from token {first + 1} on"


def _comparable(text: str) -> str:
    """Return the text without the marks of invalid bytes, which some engines leave out, and without outer spaces."""
    return text.replace("\ufffd", "").strip()


def _first_difference(expected: list[int], actual: list[int]) -> str:
    pairs = enumerate(zip(expected, actual, strict=False))
    common = next((number for number, (one, other) in pairs if one != other), min(len(expected), len(actual)))
    start = max(common - 2, 0)
    return f"ids {actual[start : common + 4]} instead of {expected[start : common + 4]} from position {start} on"


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}...")
