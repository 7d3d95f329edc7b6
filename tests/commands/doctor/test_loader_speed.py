"""The recommended number of loader processes for measured speeds."""

import json

from finetune.commands.doctor.loader_speed import choose_number, examine_loader


def test_the_smallest_number_of_workers_that_is_nearly_the_fastest_is_chosen():
    assert choose_number({0: 10_000, 1: 4_000, 2: 8_000, 4: 16_000, 8: 17_000}) == 4


def test_the_loader_of_a_job_is_measured_and_settings_are_recommended(tmp_path, capsys):
    rows = [json.dumps({"prompt": f"say {number}", "completion": str(number)}) for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "job.yaml").write_text(
        """
run: {folder: run}
model:
  from_config: {model_type: llama, values: {hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1}}
  tokenizer: {train: {vocabulary_size: 300}}
data: {train: {path: rows.jsonl}, max_length: 64, chat_template: chatml, cache_folder: cache}
task: {name: sft}
train: {global_batch_size: 4, microbatch_size: 2, steps: 2, learning_rate: 1e-3}
"""
    )
    examine_loader(tmp_path / "job.yaml", [], seconds=0.01)
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert next(line for line in lines if "num_workers" in line).split()[:2] == ["num_workers", "tokens/s"]
    assert "Write in job.yaml:\n\ndata:\n  num_workers: " in printed
