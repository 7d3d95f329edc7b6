"""Recommended data loader settings for measured speeds."""

import json

import pytest

from finetune.commands.doctor.loader_speed import (
    LoaderMeasurement,
    choose_settings,
    examine_loader,
    loading_table,
    settings_to_try,
    tokens_per_second_of_a_rank,
    waiting_share,
    yaml_lines,
)
from finetune.config.sections.data import DataSection, TrainingSourceSection
from finetune.data.loader import LoaderSettings, MachineResources


def measured(num_workers, tokens_per_second, *, prefetch_factor=2, pin_memory=False):
    settings = LoaderSettings(num_workers, pin_memory, False, prefetch_factor if num_workers else None)
    return LoaderMeasurement(settings, 0.1, tokens_per_second / 100, tokens_per_second)


def test_loading_adds_to_computing_without_workers_and_overlaps_it_with_workers():
    assert waiting_share(measured(0, 9000), 1000) == pytest.approx(0.1)
    assert waiting_share(measured(1, 9000), 1000) == 0.0
    assert waiting_share(measured(1, 500), 1000) == pytest.approx(0.5)


def test_the_smallest_sufficient_number_of_workers_is_chosen():
    measurements = [measured(0, 10_000), measured(1, 4_000), measured(2, 8_000), measured(4, 16_000)]
    assert choose_settings(measurements, 100.0).settings.num_workers == 0  # one step in a hundred is spent loading
    assert choose_settings(measurements, 3_000.0).settings.num_workers == 1
    assert choose_settings(measurements, 7_000.0).settings.num_workers == 2
    assert choose_settings(measurements, 90_000.0).settings.num_workers == 4  # none is enough: the least waiting


def test_without_a_run_the_fewest_workers_that_are_nearly_fastest_are_chosen():
    assert (
        choose_settings([measured(0, 1_000), measured(2, 9_500), measured(4, 10_000)], None).settings.num_workers == 2
    )


def test_among_settings_with_equal_workers_the_fastest_is_chosen():
    measurements = [measured(1, 9_000, prefetch_factor=2), measured(1, 9_900, prefetch_factor=4)]
    assert choose_settings(measurements, 1_000.0).settings.prefetch_factor == 4


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


def test_settings_up_to_the_number_of_cores_are_tried_with_pinning_only_on_a_gpu():
    plain = settings_to_try(MachineResources(num_cores=2, local_world=1, has_device=False))
    assert {each.num_workers for each in plain} == {0, 1, 2} and not any(each.pin_memory for each in plain)
    pinned = settings_to_try(MachineResources(num_cores=16, local_world=1, has_device=True))
    assert {each.num_workers for each in pinned} == {0, 1, 2, 4, 8, 16}
    assert {each.pin_memory for each in pinned} == {False, True}


def test_the_printed_keys_are_valid_in_a_job():
    written = yaml_lines(measured(4, 1.0, pin_memory=True).settings)
    keys = dict(line.strip().split(": ") for line in written.splitlines())
    values = {name: json.loads(value) for name, value in keys.items()}
    section = DataSection(train=TrainingSourceSection(path="rows.jsonl"), max_length=8, **values)
    assert (section.num_workers, section.pin_memory, section.prefetch_factor) == (4, True, 2)
    assert section.persistent_workers is True


def test_the_table_shows_the_waiting_share_where_a_run_is_known():
    rows = [measured(0, 9_000), measured(1, 500)]
    assert [len(loading_table(rows, consumed).columns) for consumed in (None, 1_000.0)] == [7, 8]


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
    assert next(line for line in lines if "num_workers" in line).split()[:2] == ["num_workers", "prefetch_factor"]
    assert "has no run that shows the speed" in printed
    assert "Write in job.yaml:\n\ndata:\n  num_workers: " in printed
