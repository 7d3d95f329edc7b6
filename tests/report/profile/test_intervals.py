import random
from itertools import pairwise

from finetune.report.profile.intervals import difference, intersection, length, union


def moments(intervals):
    return {moment for start, end in intervals for moment in range(start, end)}


def test_sets_of_moments_are_those_of_the_moments_one_by_one():
    chance = random.Random(0)
    for _ in range(300):
        one, other = ([(start := chance.randrange(40), start + chance.randrange(9)) for _ in range(6)] for _ in "ab")
        merged, others = union(one), union(other)
        assert moments(merged) == moments(one)
        assert length(merged) == len(moments(one))
        assert all(end < start for (_, end), (start, _) in pairwise(merged))
        assert moments(intersection(merged, others)) == moments(one) & moments(other)
        assert moments(difference(merged, others)) == moments(one) - moments(other)
        assert length(difference(merged, others)) == len(moments(one) - moments(other))


def test_empty_intervals_cover_no_time():
    assert union([(3, 3)]) == difference([], [(1, 2)]) == intersection([(1, 2)], []) == []
