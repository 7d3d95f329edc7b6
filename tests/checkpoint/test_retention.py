import pytest

from finetune.checkpoint.retention import removable_steps


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
