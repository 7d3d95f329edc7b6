"""The start logs the share of padding, which sorting by length lowers."""

import json

import pytest

from finetune.config.load import load_config
from finetune.report.reporter import RunLog
from finetune.run.setup.training_data import audit_training_data, make_training_data, write_audit

JOB = """
run: {{folder: run}}
model:
  from_config: {{model_type: llama, values: {{hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1}}}}
  tokenizer: {{train: {{vocabulary_size: 1000}}}}
data:
  train:
    path: {path}
{source}
  max_length: {max_length}
  over_length: {over_length}
  no_target: drop
  chat_template: chatml
  cache_folder: {cache}
task: {{name: sft}}
train: {{global_batch_size: 8, microbatch_size: 4, steps: 2, learning_rate: 1e-3}}
"""
COLUMNS = """\
    format: prompt_completion
    columns: {prompt: question, completion: answer}
"""


@pytest.mark.parametrize("is_padded", [True, False])
def test_the_start_logs_the_share_of_padding(tmp_path, is_padded):
    rows = [{"question": "a " * length, "answer": "b"} for length in (1, 40, 3, 30, 5, 20, 2, 10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"path": "rows.jsonl", "source": COLUMNS, "max_length": 128, "over_length": "truncate", "cache": "cache"}
    (tmp_path / "job.yaml").write_text(JOB.format(**settings))
    said: list[str] = []
    shares = []
    for steps in ("auto", 0) if is_padded else ("auto",):
        layout = [
            f"data.batching.padding_free={str(not is_padded).lower()}",
            f"data.batching.length_window_steps={steps}",
        ]
        config = load_config(tmp_path / "job.yaml", layout).config
        data = make_training_data(config, RunLog(is_main=False))
        write_audit(tmp_path, config, data, log=said.append)
        shares.append(audit_training_data(config, data).padding.share)
    lines = [line for line in said if line.startswith("padding: ")]
    if is_padded:
        assert 0 < shares[0] < shares[1]
        assert lines[0].startswith(f"padding: {shares[0]:.1%} of the computed positions (plain batches: ")
    else:
        assert (shares, lines) == ([0.0], [])
