import pytest

from comparison.results import Result, Spread


def found(*values: float, threshold: float, better: str = "higher", is_aim: bool = False) -> Result:
    return Result(2, "a ratio", Spread.of(values), threshold, better, is_aim=is_aim)  # type: ignore[arg-type]


def test_spread_is_the_median_with_its_quartiles() -> None:
    assert Spread.of([5, 1, 4, 2, 3]) == Spread(2, 3, 4, 5)


def test_ratios_are_taken_round_by_round_before_the_median() -> None:
    assert Spread.of_ratios([2, 20, 300], [1, 10, 100]).median == 2  # though the medians' ratio is 2, the third is 3
    assert Spread.of_ratios([2, 20, 300], [1, 10, 100]).high == 2.5


@pytest.mark.parametrize(
    ("values", "threshold", "better", "verdict"),
    [
        ((2.0, 2.1, 2.2), 2.0, "higher", "met"),
        ((1.8, 1.9, 2.2), 2.0, "higher", "within the spread"),  # the upper quartile is 2.05
        ((1.7, 1.8, 1.9), 2.0, "higher", "MISSED"),
        ((0.9, 1.0, 1.1), 1.02, "lower", "met"),
        ((1.0, 1.03, 1.1), 1.02, "lower", "within the spread"),
        ((1.05, 1.06, 1.1), 1.02, "lower", "MISSED"),
    ],
)
def test_verdict_leaves_the_spread_to_a_threshold(
    values: tuple[float, ...], threshold: float, better: str, verdict: str
) -> None:
    each = found(*values, threshold=threshold, better=better)
    assert each.verdict == verdict
    assert each.is_missed is (verdict == "MISSED")


def test_a_missed_goal_is_not_a_failure() -> None:
    aim = found(1.7, 1.8, 1.9, threshold=2.0, is_aim=True)
    assert (aim.verdict, aim.is_missed) == ("not reached", False)
