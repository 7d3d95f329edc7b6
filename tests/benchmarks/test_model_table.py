"""docs/reference/models.md is made from the results for this transformers; a sample of its rows still holds."""

import json
import re
import sys
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

from benchmarks import model_table
from benchmarks.model_table import COLUMNS, FAILED, REFUSED, ROOT, TRAINED, Result
from tests.launching import capture

PAGE = (ROOT / "docs" / "reference" / "models.md").read_text()
ROWS = {
    cells[0]: dict(zip(COLUMNS, cells[1:], strict=True))
    for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines())
    if len(cells) == len(COLUMNS) + 1 and cells[0] not in ("model type", "---")
}
SAMPLE = (
    *(("gemma4_text", "causal"), ("mamba2", "causal"), ("bart", "seq2seq"), ("deberta-v2", "tokens")),
    *(("bert", "masked"), ("t5", "classification")),
)


def test_the_page_names_its_transformers_and_only_model_types_of_its_mappings():
    """It may be of an earlier minor version than the installed one: to make it again takes an hour."""
    version = Version(re.search(r"with transformers ([\d.]+);", PAGE)[1])
    installed = Version(transformers.__version__)
    assert version <= installed
    assert version.release[:2] >= (5, 23)
    assert len(ROWS) > 180
    for model_type, cells in ROWS.items():
        filled = {task for task, cell in cells.items() if cell}
        assert filled <= {task for task in COLUMNS if model_type in COLUMNS[task].model_types()}, model_type


def test_the_page_has_a_row_per_trainable_architecture_and_groups_failures_by_message():
    results = [
        Result("causal", "llama", TRAINED, layout="padding-free batches"),
        Result("causal", "bart", TRAINED, layout="samples are padded, and sorted: `bart`: it is not known"),
        Result("classification", "bart", REFUSED, "error: model: `bart` needs a package"),
        Result("causal", "cpmant", FAILED, "losses 26.1 and 25.5"),
    ]
    text = model_table.page(results)
    assert "| llama | free |  | ? |" in text
    assert "| bart | padded 1 | ? | refused |" in text
    assert "- model: `TYPE` needs a package: bart (classification)" in text
    assert "it reads its padding: cpmant (causal)" in text
    assert "| cpmant" not in text


@pytest.mark.parametrize(
    ("model_type", "spared", "decayed"),
    [
        ("gpt_oss", ("down_proj_bias", "gate_up_proj_bias"), ("down_proj", "gate_up_proj", "router.weight")),
        ("mamba", ("A_log",), ()),
        ("t5", ("relative_attention_bias.weight",), ()),
        ("vit", ("cls_token",), ("position_embeddings",)),
        ("convnextv2", ("bias", "grn.weight"), ()),
        ("llama", (), ()),
    ],
)
def test_the_page_lists_the_parameters_of_a_type_without_weight_decay(model_type, spared, decayed):
    assert model_table.decay_of(model_type) == (spared, decayed)
    rows = re.findall(r"^\| ([^|`]*) \| ([^|]*) \| ([^|]*) \|$", PAGE.partition("## Weight decay")[2], re.MULTILINE)
    listed = {each: cells for types, *cells in rows for each in types.split(", ")}
    assert len(listed) > 100
    expected = [" ".join(f"`{name}`" for name in names) for names in (spared, decayed)]
    assert listed.get(model_type, ["", ""]) == expected


@pytest.mark.full
@pytest.mark.parametrize(("model_type", "task"), SAMPLE)
def test_a_row_of_the_page_still_holds(model_type, task, tmp_path: Path):
    script = str(ROOT / "benchmarks" / "model_table.py")
    ended = capture(
        [sys.executable, script, "--only", model_type, "--tasks", task, "--folder", str(tmp_path)], timeout_seconds=240
    )
    (recorded,) = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert recorded["outcome"] == TRAINED, ended.stdout
    is_free = recorded["layout"].startswith("padding-free")
    assert re.fullmatch("yes|free" if is_free or task == "images" else r"padded( \d+)?", ROWS[model_type][task])
