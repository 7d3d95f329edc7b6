"""What `finetune check` says of the rows that are learnt from and evaluated on."""

import pytest

from finetune.config.summary import summary

MIX = "data.train={mix: [{path: rows.jsonl, weight: 1.5}, {name: squad, weight: 2.0, stream: {}}]}"
EVALUATED = "evaluate={}"

ROWS = [
    (["data.train.stream={}"], "FOLDER/rows.jsonl as a stream"),
    ([MIX], "a mix of FOLDER/rows.jsonl (weight 1.5), squad as a stream (weight 2)"),
    ([EVALUATED, "data.validation={name: squad, split: dev}"], "FOLDER/rows.jsonl, evaluated on squad"),
    ([EVALUATED, "data.validation={fraction: 0.05}"], "FOLDER/rows.jsonl, evaluated on 0.05 of its rows"),
    ([EVALUATED, "data.validation={hash_fraction: 0.1}"], "evaluated on 0.1 of its rows, drawn by content"),
    (
        [EVALUATED, "data.validation={path: rows.jsonl, exclude_from_train: true}"],
        "evaluated on FOLDER/rows.jsonl, whose rows are left out of training",
    ),
]


@pytest.mark.parametrize(("written", "said"), ROWS)
def test_the_first_line_says_what_is_learnt_from(load, tmp_path, written, said):
    line = summary(load(*written).config, num_processes=1)[0]
    assert line.startswith("task     sft, from ")
    assert line.endswith(said.replace("FOLDER", str(tmp_path)))
