import pytest

from finetune.checkpoint.write.retention import best_steps, removable_steps
from finetune.config.sections.checkpoint import KeepBestSection

LOSSES = {100: 0.5, 200: 0.2, 300: 0.4, 400: 0.2, 500: 0.9, 600: float("nan")}


@pytest.mark.parametrize(
    ("steps", "newest_valid", "removable"),
    [
        ([100, 200, 300], 300, [100]),
        ([100, 200], 200, []),
        ([100, 200, 300, 400], 200, []),  # 300 and 400 are not this run's past
        ([300, 100, 400, 200], 400, [100, 200]),
        ([], 100, []),
    ],
)
def test_the_two_newest_stay(steps, newest_valid, removable):
    assert removable_steps(steps, keep_last=2, newest_valid=newest_valid) == removable


def test_the_newest_valid_one_is_never_removable():
    for newest in range(1, 6):
        assert newest not in removable_steps(range(1, 6), keep_last=2, newest_valid=newest)


@pytest.mark.parametrize(
    ("every", "best", "removable"),
    [
        (None, None, [100, 200, 300, 400, 500, 600]),
        (200, None, [100, 300, 500]),
        (None, {}, [100, 200, 300, 500, 600]),  # of equals the later one
        (None, {"count": 3}, [100, 500, 600]),
        (None, {"goal": "maximize"}, [100, 200, 300, 400, 600]),
        (250, {"count": 2}, [100, 300, 600]),
        (None, {"metric": "accuracy"}, [100, 200, 300, 400, 500, 600]),  # nobody has measured it
    ],
)
def test_retention_keeps_milestones_and_the_best_in_addition_to_the_newest(every, best, removable):
    steps = [*LOSSES, 700, 800]  # the last two were not evaluated
    found = removable_steps(
        steps,
        keep_last=2,
        newest_valid=800,
        keep_every_steps=every,
        keep_best=KeepBestSection(**best) if best is not None else None,
        metrics={step: {"loss": loss} for step, loss in LOSSES.items()},
    )
    assert found == removable


def test_the_best_is_never_removable_even_when_it_is_the_oldest():
    for count in (1, 2, 3):
        wanted = KeepBestSection(metric="loss", count=count)
        metrics = {step: {"loss": loss} for step, loss in LOSSES.items()}
        best = best_steps(metrics, wanted)
        assert len(best) == count and best[0] == 400
        removable = removable_steps(LOSSES, keep_last=2, newest_valid=600, keep_best=wanted, metrics=metrics)
        assert not set(best) & set(removable)
