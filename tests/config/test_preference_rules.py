import pytest

PAIRS = "data.train={path: rows.jsonl, format: preference}"
JUDGED = "data.train={path: rows.jsonl, format: judged}"
STREAM = "data.train={path: rows.jsonl, format: preference, stream: {}}"
ROBUST = "task.preference={loss: robust, label_smoothing: 0.1}"

WRONG = [
    ([PAIRS, "task.preference.loss=robust"], "task.preference.label_smoothing", "without it `robust` is `sigmoid`"),
    ([JUDGED], "data.train.format", "only `task.preference.loss: kto` learns from single answers"),
    ([STREAM], "data.train.stream", "the reference's log-probabilities are worked out before the first step"),
    ([PAIRS, "data.over_length=split"], "data.over_length", "learns from whole rows"),
    ([PAIRS, "data.batching={by: packs}"], "data.batching.by", "pads its samples"),
]


@pytest.mark.parametrize(("overrides", "place", "said"), WRONG, ids=[place for _, place, _ in WRONG])
def test_what_a_loss_cannot_do_without_is_told(problems, overrides, place, said):
    found = problems("task.name=preference", *overrides)
    assert [problem.message for problem in found if problem.key == place and said in problem.message]


@pytest.mark.parametrize(
    "overrides", [[PAIRS], [PAIRS, ROBUST], [JUDGED, "task.preference.loss=kto"], [STREAM, "task.preference.loss=orpo"]]
)
def test_what_fits_is_not_told_off(problems, overrides):
    assert problems("task.name=preference", *overrides) == []
