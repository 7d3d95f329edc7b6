import io

import pytest
from rich.console import Console

from finetune.report.console import (
    ConsoleReporter,
    PlainScreen,
    RichScreen,
    choose_screen,
    format_hms,
    format_metric_changes,
)
from finetune.report.events import Answered, CheckpointSaved, Evaluated, Noted, RunEnded, StepSkipped, Warned
from finetune.runtime.resources import format_size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-:--:--"), (0, "0:00:00"), (72.4, "0:01:12"), (3725, "1:02:05"), (360_000, "100:00:00")],
)
def test_durations_are_hours_minutes_seconds(seconds, text):
    assert format_hms(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (1_200_000_000, "1.2 GB"), (3 * 10**12, "3.0 TB")],
)
def test_sizes_are_decimal(num_bytes, text):
    assert format_size(num_bytes) == text


def test_a_metric_without_a_value_before_stands_alone():
    assert (
        format_metric_changes({"loss": 4.0}, {"loss": 1.0, "exact_match": 0.5})
        == "exact_match 0.5000  loss 4.0000 -> 1.0000"
    )


def plain(*told, log_every_steps=1):
    """Return the lines that a plain console writes for the events."""
    file = io.StringIO()
    reporter = ConsoleReporter(PlainScreen(file), log_every_steps=log_every_steps)
    for event in told:
        reporter(event)
    reporter.close()
    return file.getvalue().splitlines()


def test_a_step_is_one_greppable_line(started, take_step):
    line = plain(started, take_step(20))[-1]
    assert line == "step  20/120  loss 2.3107  lr 9.8e-04  grad 1.02    1,234 tokens/s  eta 0:01:40  mem 1.2 GB"


def test_step_lines_are_aligned(started, take_step):
    told = [take_step(step, num_tokens=tokens) for step, tokens in [(9, 80), (10, 900), (100, 12_345)]]
    lines = plain(started, *told)[-3:]
    assert len({len(line) for line in lines}) == 1
    assert len({line.index("tokens/s") for line in lines}) == 1


def test_the_start_shows_strategy_and_arithmetic(started):
    assert plain(started) == ["strategy zero2", *started.arithmetic]


def test_waiting_for_data_is_printed_only_above_a_threshold(started, take_step):
    assert plain(started, take_step(1, data_seconds=0.4))[-1].endswith("waiting for data 40%")
    assert "waiting" not in plain(started, take_step(1, data_seconds=0.05))[-1]


def test_the_share_of_waiting_is_of_all_steps_since_the_last_line(started, take_step):
    told = [take_step(1, data_seconds=0.0), take_step(2, data_seconds=0.5), take_step(3), take_step(4)]
    first, second = plain(started, *told, log_every_steps=2)[-2:]
    assert first.endswith("waiting for data 25%")  # half a second of two
    assert "waiting" not in second


def test_log_every_steps_thins_the_lines_and_keeps_the_last(started, take_step):
    lines = plain(started, *[take_step(step) for step in range(1, 121)], log_every_steps=50)
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["50/120", "100/120", "120/120"]


def test_the_console_prints_evaluations_answers_checkpoints_and_warnings():
    lines = plain(
        Noted(0, "tokenizer: 512 entries"),
        StepSkipped(3, "non-finite", (17, 4), "a.jsonl, row 18; a.jsonl, row 5"),
        Evaluated(40, metrics={"loss": 0.5, "exact_match": 0.25}, num_rows=1200, seconds=3.21),
        Answered(40, prompt="Say [hi]", answer="hi\n", reference="hi"),
        CheckpointSaved(40, "runs/a/checkpoints/step-000040", size_bytes=1_500_000, seconds=2.5, stall_seconds=0.1),
        Warned(41, "bf16 asked for, fp32 used"),
    )
    assert lines == [
        "tokenizer: 512 entries",
        "step 3 skipped: non-finite; samples 17, 4 (a.jsonl, row 18; a.jsonl, row 5)",
        "evaluated at step 40  exact_match 0.2500  loss 0.5000  (1,200 rows, 3.2 s)",
        "  prompt    'Say [hi]'",
        "  answer    'hi\\n'",
        "  reference 'hi'",
        "checkpoint runs/a/checkpoints/step-000040  (1.5 MB, 2.5 s, training waited 0.1 s)",
        "warning: bf16 asked for, fp32 used",
    ]


def test_the_end_shows_how_far_the_metrics_have_come():
    lines = plain(
        Evaluated(0, metrics={"exact_match": 0.0}, num_rows=8, seconds=0.1),
        Evaluated(50, metrics={"exact_match": 0.5}, num_rows=8, seconds=0.1),
        RunEnded(80, reason="finished", seconds=3725.0, metrics={"exact_match": 1.0}, final_folder="runs/a/final"),
    )
    assert lines[-4:] == [
        "exact_match 0.0000 -> 1.0000",
        "finished at step 80 after 1:02:05",
        "model in runs/a/final",
        "chat with it: finetune chat runs/a/final",
    ]


def test_a_single_evaluation_is_printed_without_a_change():
    lines = plain(
        Evaluated(80, metrics={"loss": 0.5}, num_rows=8, seconds=0.1),
        RunEnded(80, reason="finished", seconds=1.0, metrics={"loss": 0.5}, final_folder=None),
    )
    assert lines[1] == "loss 0.5000"


def test_the_end_of_a_run_without_evaluation_or_export():
    assert plain(RunEnded(8, reason="signal SIGTERM", seconds=2.0, metrics={}, final_folder=None)) == [
        "signal SIGTERM at step 8 after 0:00:02"
    ]


def rich(*told, log_every_steps=1):
    file = io.StringIO()
    screen = RichScreen(Console(file=file, force_terminal=True, width=200, color_system=None))
    reporter = ConsoleReporter(screen, log_every_steps=log_every_steps)
    for event in told:
        reporter(event)
    reporter.close()
    return file.getvalue()


def test_the_bar_shows_the_numbers_of_the_step(started, take_step):
    shown = rich(started, take_step(119), take_step(120))
    for part in ("120/120", "loss 2.3107", "lr 9.8e-04", "1,234 tokens/s", "eta 0:00:00", "mem 1.2 GB"):
        assert part in shown


def test_an_answer_is_not_interpreted_as_console_markup(started, take_step):
    shown = rich(started, take_step(1), Answered(1, prompt="[red]x", answer="[/nonsense]", reference="[bold]"))
    assert "'[red]x'" in shown and "'[/nonsense]'" in shown and "'[bold]'" in shown


def test_the_terminal_gets_its_cursor_back(started, take_step):
    assert rich(started, take_step(1)).rstrip().endswith("\x1b[?25h")


@pytest.mark.parametrize(
    ("asked", "is_terminal", "expected"),
    [
        ("auto", True, RichScreen),
        ("auto", False, PlainScreen),
        ("rich", False, RichScreen),
        ("plain", True, PlainScreen),
    ],
)
def test_auto_asks_whether_there_is_a_terminal(monkeypatch, asked, is_terminal, expected):
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal, raising=False)
    assert type(choose_screen(asked)) is expected
