"""What `pretrained.py` says about figures; the program itself runs in a stage of `.ci/run`, which has the models."""

import json

import torch
from safetensors.torch import save_file

from pretrained_runs.cases import CASES, make_rows, tiny
from pretrained_runs.report import differences
from pretrained_runs.steps import rows_compared, weights_difference

SAME = {"all": 2, "equal ids": 2, "equal targets but for the newline": 2}


def test_a_loss_a_weight_or_a_row_that_differs_is_named():
    good = {"loss_difference": 9e-5, "weights": {"merged": 9e-5}, "rows": SAME}
    assert differences({"gsm8k": good}) == []
    for changed in (
        {"loss_difference": 2e-4},
        {"loss_difference": float("nan")},
        {"weights": {"merged": 2e-4}},
        {"rows": {**SAME, "equal ids": 1}},
        {"figures": {"accuracy": {"ours": 0.5, "theirs": 0.51}}},
    ):
        [line] = differences({"gsm8k": {**good, **changed}})
        assert line.startswith("gsm8k: ")


def test_a_strategy_or_an_export_that_differs_is_named():
    assert differences({"strategies": {"differences": {"ddp": 2e-6, "zero3": 8e-6}}}) == []
    assert differences({"strategies": {"differences": {"ddp": 2e-6, "zero3": 2e-5}}}) == [
        "strategies: zero3 by 2.0e-05"
    ]
    exports = {"merged, transformers": 49, "GGUF f16, read by transformers": 49, "GGUF q8_0, read by transformers": 40}
    [line] = differences({"answers": {"prompts": 50, "exports": exports}})
    assert "merged, transformers: 49 of 50" in line


def test_a_row_is_equal_but_for_the_newline_only_if_nothing_else_differs(tmp_path):
    ours = [([5, 6, 7, 8], [0, 1, 1, 0]), ([5, 6, 7, 8], [0, 1, 1, 0]), ([5, 6], [0, 0])]
    theirs = [([5, 6, 7, 8], [0, 1, 1, 1]), ([5, 6, 7, 8], [0, 0, 1, 1]), ([5, 9], [0, 1])]
    (tmp_path / "ours.json").write_text(json.dumps(ours))
    (tmp_path / "theirs.json").write_text(json.dumps(theirs))
    assert rows_compared(tmp_path) == {"all": 3, "equal ids": 2, "equal targets but for the newline": 2}


def test_adapters_are_compared_by_what_they_add_to_the_merged_weights(tmp_path):
    case = next(each for each in CASES if each.name == "quickstart")
    base, first, second = torch.full((4, 4), 10.0), torch.ones(2, 4), torch.ones(4, 2)
    save_file({"q.weight": base}, tmp_path / "model.safetensors")
    (tmp_path / "model.path").write_text(str(tmp_path))
    for name, factor in (("ours/final", 1.01), ("theirs", 1.0)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text('{"lora_alpha": 4, "r": 2}')
        tensors = {"base_model.model.q.lora_A.weight": first * factor, "base_model.model.q.lora_B.weight": second}
        save_file(tensors, folder / "adapter_model.safetensors")
    found = weights_difference(case, tmp_path)  # each element: 10 + 2 * 2 beside 10 + 2 * 2.02
    assert abs(found["merged"] - 0.04 / 14) < 1e-5
    assert abs(found["update"] - 0.01) < 1e-5


def test_without_the_real_rows_the_quickstarts_take_their_place(tmp_path):
    for case in map(tiny, CASES):
        rows, held_out = make_rows(case, tmp_path / "absent")
        assert len(rows) > case.batch * case.steps
        assert not {json.dumps(row) for row in rows} & {json.dumps(row) for row in held_out}
        assert bool(held_out) == (case.task != "preference")
