"""The recommended number of loader processes for measured speeds."""

import json

import pytest

from finetune.commands.doctor.loader_speed import (
    LoaderMeasurement,
    choose_measurement,
    examine_loader,
    tokens_per_second_of_a_rank,
    waiting_share,
)


def measured(num_workers, tokens_per_second):
    return LoaderMeasurement(num_workers, 0.1, tokens_per_second / 100, tokens_per_second)


def test_loading_adds_to_computing_without_workers_and_overlaps_it_with_workers():
    assert waiting_share(measured(0, 9000), 1000) == pytest.approx(0.1)
    assert waiting_share(measured(1, 9000), 1000) == 0.0
    assert waiting_share(measured(1, 500), 1000) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("consumed", "num_workers"), [(100.0, 0), (3_000.0, 1), (7_000.0, 2), (90_000.0, 4), (None, 4)]
)
def test_the_smallest_sufficient_number_of_workers_is_chosen(consumed, num_workers):
    """At 100 tokens/s one step in a hundred is spent loading; for 90,000 none is enough: the least waiting."""
    measurements = [measured(0, 10_000), measured(1, 4_000), measured(2, 8_000), measured(4, 16_000)]
    assert choose_measurement(measurements, consumed).num_workers == num_workers
    assert choose_measurement([*measurements, measured(8, 17_000)], None).num_workers == 4  # nearly the fastest


def test_the_token_rate_of_a_rank_is_read_from_the_events_of_a_run(tmp_path):
    assert tokens_per_second_of_a_rank(tmp_path) is None
    numbers = {"loss": 1.0, "gradient_norm": 1.0, "learning_rate": 0.1, "num_targets": 9, "samples_sha256": "aa"}
    times = {"num_tokens": 4000, "seconds": 2.5, "data_seconds": 0.5, "data_share": 0.2, "epoch": 0.1}
    warm = {"event": "StepTaken", "step": 1, "time": 9.0, **numbers, **times, "memory_bytes": 9}
    seconds = (90.0, 90.0, 2.5, 2.5, 2.5)
    steps = [{**warm, "step": step, "seconds": taken} for step, taken in enumerate(seconds, start=1)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (tmp_path / "environment.json").write_text(json.dumps({"launcher": {"WORLD_SIZE": "2"}}))
    assert tokens_per_second_of_a_rank(tmp_path) == pytest.approx(1000.0)  # of two ranks, each half of 4000 in 2 s


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
    examine_loader(tmp_path / "job.yaml", [], num_rounds=1, seconds=0.01)
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert next(line for line in lines if "num_workers" in line).split()[:2] == ["num_workers", "samples/s"]
    assert "has no run that shows the speed" in printed
    assert "Write in job.yaml:\n\ndata:\n  num_workers: " in printed
