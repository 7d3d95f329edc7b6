"""Answers that are judged, and pairs with a margin."""

import pytest

from finetune.config.sections.data import TrainingSourceSection
from finetune.data.formats.row_format import choose_format
from finetune.data.rows import RawRow
from finetune.errors import DataError
from tests.refusals import refused


def read(row: dict, **section):
    raw = RawRow("rows.jsonl", 1, row)
    source = TrainingSourceSection.model_validate({"path": "rows.jsonl", **section})
    return choose_format(source, raw, key="data.train", log=lambda _: None).read(raw)


ANSWER = {"prompt": "2 + 2?", "completion": "4"}


@pytest.mark.parametrize(("label", "is_good"), [(True, True), (False, False), (1, True), (0, False), ("true", True)])
def test_a_judged_answer_is_turns_and_whether_it_is_good(label, is_good):
    row = read({**ANSWER, "label": label}, format="judged")
    assert row["prompt"] == [{"role": "user", "content": "2 + 2?"}]
    assert row["completion"] == [{"role": "assistant", "content": "4"}]
    assert row["is_good"] is is_good


def test_a_template_maps_other_label_words_to_booleans():
    with refused(DataError, "rows.jsonl, row 1", "`label`"):
        read({**ANSWER, "label": "good"}, format="judged")
    template = {"label": "{{ label == 'good' }}"}
    assert read({**ANSWER, "label": "good"}, format="judged", template=template)["is_good"] is True


def test_a_pair_may_have_a_margin():
    pair = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}
    assert read({**pair, "margin": 0.5})["margin"] == 0.5
    assert "margin" not in read(pair)
    with refused(DataError, "`margin`"):
        read({**pair, "margin": "wide"})
