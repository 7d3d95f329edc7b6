import json
from pathlib import Path

from finetune.config.schema import all_keys, description_of, json_schema, reference_markdown, reference_pages

DOCS = Path(__file__).parents[2] / "docs"


def test_the_committed_reference_is_the_generated_one():
    committed = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "reference" / "job").iterdir()}
    assert committed == reference_pages(), "run `finetune reference --into docs/reference/job`"


def test_the_pages_of_the_reference_hold_every_line_of_the_whole():
    pages = reference_pages()
    assert {"index.md", "run.md", "model.md", "data.md", "task.md", "train.md"} <= set(pages)
    rows = [line.partition(" | ")[0] for page in pages.values() for line in page.splitlines() if line.startswith("| `")]
    whole = [line.partition(" | ")[0] for line in reference_markdown().splitlines() if line.startswith("| `")]
    assert len(whole) > 200 and set(whole) <= set(rows)
    assert all(page.startswith("# ") and page.endswith("\n") for page in pages.values())


def test_the_committed_schema_is_the_generated_one():
    committed = (DOCS / "finetune.schema.json").read_text(encoding="utf-8")
    assert committed == json_schema(), "run `finetune schema > docs/finetune.schema.json`"


def test_every_key_is_explained_in_a_sentence():
    keys = dict(all_keys())
    assert len(keys) > 100
    assert [key for key, node in keys.items() if not description_of(node).endswith(".")] == []


def test_the_reference_lists_type_default_and_meaning_of_each_key():
    page = reference_markdown()
    assert "| `train.learning_rate` | a number above 0 | **required** | Peak learning rate. |" in page
    assert "| `checkpoint.keep_last` | a whole number of at least 2 | `2` |" in page
    assert "| `evaluate.generate` | a section | none |" in page
    assert "### `train.optimizer`" in page


def test_the_json_schema_rejects_unknown_keys():
    schema = json.loads(json_schema())
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["run", "model", "data", "task", "train"]
    assert schema["$defs"]["TaskSection"]["properties"]["name"]["enum"][:2] == ["sft", "pretrain"]
