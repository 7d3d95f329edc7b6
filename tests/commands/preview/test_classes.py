"""A preview of rows with classes shows each with its class, and how often each class occurs."""

import json

import pytest

from finetune.commands.preview.preview import preview

JOB = """
run: {folder: run, seed: 3}
model:
  from_config: {model_type: bert, values: {hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1}}
  tokenizer: {train: {vocabulary_size: 300}}
data:
  train: {path: rows.jsonl}
  max_length: 96
  cache_folder: cache
  shuffle: false
task: {name: TASK, classification: {class_weights: balanced}}
train: {global_batch_size: 4, microbatch_size: 2, steps: 2, learning_rate: 1e-3}
"""
ROWS = {
    "text_classification": [{"text": "a b", "label": "warm"}] * 3 + [{"text": "c", "label": "cold"}],
    "token_classification": [{"tokens": ["a", "b"], "tags": ["O", "B-X"]}] * 4,
}
SHOWN = {
    "text_classification": ["2 classes: `cold` 1 (weight 2), `warm` 3 (weight 0.667)", " targets (50%) → warm", "a┊·b"],
    "token_classification": ["2 classes: `B-X` 4 (weight 1), `O` 4 (weight 1)", "2 targets (100%) → O B-X", "⟦a┊·b⟧"],
}


@pytest.mark.parametrize("task", SHOWN)
def test_classification_rows_are_previewed_with_their_labels(task, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[task]))
    (tmp_path / "job.yaml").write_text(JOB.replace("TASK", task))
    preview(tmp_path / "job.yaml", (), num_rows=2, start=0)
    said = capsys.readouterr().out
    assert [each for each in SHOWN[task] if each not in said] == []
