"""The comparison sees a run's steps as they are: data, forward, backward, update, and a record for each."""

from finetune.config.load import load_config
from finetune.run.train import train_from_config

from comparison.product import observed


def test_every_step_is_seen_from_its_data_to_its_record(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "one two three four"}\n' * 8)
    job = tmp_path / "job.yaml"
    job.write_text(
        f"""\
run: {{folder: {tmp_path}/run, seed: 1}}
model:
  from_config: {{model_type: llama, values: {{hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1,
    num_attention_heads: 2}}}}
  tokenizer: {{train: {{vocabulary_size: 300}}}}
data: {{train: {{path: {tmp_path}/rows.jsonl, format: text}}, max_length: 8, over_length: truncate,
  cache_folder: {tmp_path}/cache}}
task: {{name: pretrain}}
train: {{global_batch_size: 4, microbatch_size: 2, steps: 2, learning_rate: 1e-3}}
checkpoint: {{rehearse: false}}
"""
    )
    seen = []
    with observed(begin=lambda: seen.append("data"), phase=seen.append, end=lambda record: seen.append(record.number)):
        train_from_config(load_config(job, []))
    microbatches = ["forward", "backward"] * 2
    assert seen == ["data", *microbatches, "update", 1, "data", *microbatches, "update", 2]
