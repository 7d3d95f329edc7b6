import pytest

from finetune.report.wording import change_line, duration
from finetune.runtime.amounts import size_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-:--:--"), (0, "0:00:00"), (72.4, "0:01:12"), (3725, "1:02:05"), (360_000, "100:00:00")],
)
def test_durations_are_hours_minutes_seconds(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (1_200_000_000, "1.2 GB"), (3 * 10**12, "3.0 TB")],
)
def test_sizes_are_decimal(num_bytes, text):
    assert size_text(num_bytes) == text


def test_a_metric_without_a_value_before_stands_alone():
    assert change_line({"loss": 4.0}, {"loss": 1.0, "exact_match": 0.5}) == "exact_match 0.5000  loss 4.0000 -> 1.0000"
