from comparison.growth import KEPT, NUM_COUNTED, last_of_turns, results, runs, tenths


def test_the_very_first_blocks_count_for_nothing() -> None:
    assert tenths(list(range(40))) == ([2, 3, 4, 5], [36, 37, 38, 39])
    assert tenths([5.0, 6.0, 7.0]) == ([7.0], [7.0])


def test_only_blocks_with_all_kept_checkpoints_count_in_each_turn() -> None:
    turn = [0] * (max(KEPT) // 2) + [1] * (NUM_COUNTED // 2 - 1)
    assert last_of_turns([*turn, *turn]) == [1] * 2 * (NUM_COUNTED // 2 - 1)


def test_compared_runs_alternate() -> None:
    names = [run["name"] for run in runs(1000, turns=2)]
    assert names == ["steps", *["few documents", "many documents"] * 2, *["2 kept", "50 kept"] * 2]


def test_a_cost_that_grows_is_missed() -> None:
    run = {"costs": [1.0] * 20 + [1.1] * 20, "memory": [100] * 40}
    flat = {"costs": [1.0] * 64, "memory": [100] * 64}
    names = ("few documents", "many documents", "2 kept", "50 kept")
    steps, memory, *others = results({"steps": run, **dict.fromkeys(names, flat)}, 1000)
    assert (steps.spread.median, steps.is_missed) == (1.1, True)
    assert memory.is_met
    assert all(each.is_met for each in others)
