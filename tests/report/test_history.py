"""What a run's events add up to, restarts and odd ones included."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from finetune.report.history import (
    MAX_ANSWERS,
    MAX_BUCKETS,
    MAX_PROMPTS,
    Curve,
    HistoryReader,
    RunHistory,
    read_history,
)
from tests.report.page.events import answered, ended, evaluated, started, taken, write_run


def history_of(*events: dict) -> RunHistory:
    history = RunHistory()
    history.add(events)
    return history


def values(history: RunHistory, name: str) -> list[float]:
    return history.curves[name].points().values.tolist()


def test_steps_become_curves_and_sums():
    history = history_of(started(), *(taken(step, 2.0, metrics={"accuracy": 0.5}) for step in (1, 2, 3)))
    assert values(history, "loss") == [2.0] * 3
    assert values(history, "tokens_per_second") == [800.0] * 3
    assert values(history, "metrics/accuracy") == [0.5] * 3
    assert (history.step, history.tokens, history.seconds) == (3, 1200.0, 1.5)


def test_a_step_that_is_taken_again_counts_as_taken_last():
    before = [taken(step, 9.0) for step in range(1, 6)]
    again = [taken(step, 1.0) for step in range(4, 8)]
    history = history_of(started(), *before, evaluated(5, loss=9.0), started(3), *again, evaluated(5, loss=1.0))
    assert values(history, "loss") == [9.0] * 3 + [1.0] * 4
    assert values(history, "evaluation/loss") == [1.0]
    assert history.tokens == 7 * 400
    assert history.seconds == 9 * 0.5 + 2 * 2.0  # what was lost took its time, too
    assert len(history.starts) == 2


def test_a_file_without_starts_is_read_likewise():
    history = history_of(taken(1, 5.0), taken(2, 5.0), taken(2, 1.0), taken(3, 1.0))
    assert values(history, "loss") == [5.0, 1.0, 1.0]


def test_device_hours_follow_the_number_of_processes_of_each_start():
    history = history_of(started(processes=4), taken(1, 1.0), started(1, processes=2), taken(2, 1.0))
    assert history.device_seconds == 4 * 0.5 + 2 * 0.5


def test_mfu_is_drawn_where_the_peak_is_known():
    history = history_of(started(flops_per_token=1e6, peak_flops_per_second=1.6e9), taken(1, 1.0))
    assert values(history, "mfu") == pytest.approx([0.5])  # 800 tokens/s x 1e6 / 1.6e9
    assert "mfu" not in history_of(started(peak_flops_per_second=None), taken(1, 1.0)).curves


def test_device_columns_become_curves():
    history = history_of(started(), taken(1, 1.0), taken(2, 1.0, device={"gpu_power_watts": 350.0}))
    assert values(history, "device/gpu_power_watts") == [350.0]


def test_losses_that_are_not_finite_are_written_as_strings():
    history = history_of(started(), taken(1, 1.0), taken(2, "nan"), taken(3, "inf"))
    assert values(history, "loss") == [1.0]
    assert history.curves["loss"].num_not_finite == 2


def test_answers_are_kept_by_prompt_and_bounded():
    many = [answered(step, f"answer {step}") for step in range(500)]
    others = [answered(0, "?", prompt=f"prompt {number}") for number in range(2 * MAX_PROMPTS)]
    history = history_of(*many, *others)
    (by_step,) = [each.by_step for each in history.answers.values() if each.prompt == "2 + 2"]
    assert {0, 499} <= by_step.keys()
    assert len(by_step) <= MAX_ANSWERS
    assert len(history.answers) == MAX_PROMPTS


def test_a_repeated_warning_is_kept_once():
    warnings = [{"event": "Warned", "time": 0, "step": step, "message": "slow"} for step in (3, 4)]
    history = history_of(*warnings)
    assert [(each.text, each.step, each.count) for each in history.messages.values()] == [("slow", 3, 2)]
    assert sum(message.is_warning for message in history.messages.values()) == 1


def test_a_resumed_run_has_not_ended():
    assert history_of(started(), ended(5, "time limit", None)).ended is not None
    assert history_of(started(), ended(5, "time limit", None), started(5)).ended is None


def test_only_new_lines_are_read(tmp_path: Path):
    path = write_run(tmp_path, [started(), taken(1, 1.0)]) / "events.jsonl"
    reader = HistoryReader(path)
    reader.read_new()
    with path.open("a") as file:
        file.write(json.dumps(taken(2, 1.0)) + "\n" + json.dumps(taken(3, 1.0))[:40])
    reader.read_new()
    assert reader.history.step == 2
    with path.open("a") as file:
        file.write(json.dumps(taken(3, 1.0))[40:] + "\n")
    reader.read_new()
    assert reader.history.step == 3
    assert reader.history.tokens == 1200


def test_a_file_that_was_replaced_is_read_from_its_start(tmp_path: Path):
    path = write_run(tmp_path, [started(), *(taken(step, 1.0) for step in range(1, 9))]) / "events.jsonl"
    reader = HistoryReader(path)
    reader.read_new()
    write_run(tmp_path, [started(), taken(1, 1.0)])
    reader.read_new()
    assert reader.history.step == 1


def test_every_step_and_evaluation_is_kept_on_request(tmp_path: Path):
    folder = write_run(tmp_path, [started(), taken(1, 3.0), taken(2, 2.5)])
    with (folder / "events.jsonl").open("a") as file:
        file.write("not JSON\n")
        for event in (started(step=1), taken(2, 2.0), evaluated(2, accuracy="nan"), taken(3, 1.5)):
            file.write(json.dumps(event) + "\n")
    history = read_history(folder)
    assert history.steps.numbers.tolist() == [1, 2, 3] and history.steps.losses.tolist() == [3.0, 2.0, 1.5]
    (evaluation,) = history.evaluations
    assert evaluation.step == 2 and math.isnan(evaluation.metrics["accuracy"])
    assert history.num_damaged_lines == 1


def test_a_history_without_steps_needs_an_events_file(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        read_history(tmp_path)


def curve_of(numbers: np.ndarray) -> Curve:
    curve = Curve()
    for step, value in enumerate(numbers.tolist()):
        curve.add(step, value)
    return curve


def test_a_short_curve_is_drawn_point_by_point_without_what_is_not_finite():
    curve = curve_of(np.array([5.0, math.nan, 4.0, math.inf, 6.0]))
    points = curve.points()
    assert points.steps.tolist() == [0, 2, 4]
    assert points.values.tolist() == points.means.tolist() == [5.0, 4.0, 6.0]
    assert (points.width, curve.num_not_finite) == (1, 2)


def test_a_long_curve_keeps_its_spikes_and_its_mean_and_every_drawn_point_was_measured():
    numbers = np.random.default_rng(0).normal(2.0, 0.1, 300_000)
    numbers[[12_345, 299_999]] = 50.0, -50.0
    points = curve_of(numbers).points()
    assert MAX_BUCKETS / 2 < len(points.means) <= MAX_BUCKETS
    assert points.steps[points.values.argmax()] == 12_345
    assert points.steps[points.values.argmin()] == 299_999
    assert (np.diff(points.steps) > 0).all() and (numbers[points.steps.astype(int)] == points.values).all()
    assert np.average(points.means[:-1]) == pytest.approx(numbers[: points.width * (len(points.means) - 1)].mean())


def test_steps_of_a_curve_that_are_taken_again_are_forgotten():
    curve = curve_of(np.ones(10))
    curve.cut_after(6)
    curve.add(7, 2.0)
    curve.add(5, 3.0)
    assert curve.points().values.tolist() == [1.0] * 5 + [3.0] and curve.last == 3.0
