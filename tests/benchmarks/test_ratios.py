from comparison.controller import StepCosts
from comparison.ratios import Measured, memory_results, results
from comparison.results import Result
from comparison.workloads import Form, Sizes, Workload, equivalence, memory, workloads


def steps(seconds: float, *, tokens: int = 100, losses: tuple[float, ...] = (2.0, 1.0), peak: int = 1000) -> StepCosts:
    counts = [tokens] * 3
    return StepCosts([seconds] * 3, counts, counts, losses=list(losses), peak_bytes=peak)


def measured(name: str, **costs: StepCosts) -> Measured:
    workload = Workload(name, "a title", tuple(costs), 3)
    return Measured(workload, "its lengths", {name.replace("_", " "): each for name, each in costs.items()})


def test_samples_that_differ_are_compared_by_their_tokens() -> None:
    data = measured("lognormal", trainer=steps(2.0, tokens=100), ours_tuned=steps(1.0, tokens=150))
    assert data.speed("ours tuned", "trainer").median == 3


def test_losses_that_differ_are_named_with_how_much() -> None:
    data = measured(
        "equivalence",
        bare=steps(1, losses=(2.0, 1.0)),
        trainer=steps(1, losses=(2.0, 1.000001)),
        ours=steps(1, losses=(2.0, 1.1)),
    )
    assert set(data.differing()) == {"ours"}


def test_a_nan_loss_counts_as_different() -> None:
    data = measured("equivalence", bare=steps(1), ours=steps(1, losses=(2.0, float("nan"))))
    assert set(data.differing()) == {"ours"}


def test_each_ones_best_is_compared() -> None:
    data = measured(
        "lognormal",
        bare=steps(2),
        trainer=steps(2),
        trainer_grouped=steps(1.5),
        trl_equal=steps(3),
        trl_packing=steps(2),
        trl_grouped=steps(2.5),
        ours=steps(0.9),
        ours_tuned=steps(0.8),
    )
    ratios = {
        each.what.partition("CPU-second, ")[2]: (round(each.spread.median, 2), each.threshold) for each in results(data)
    }
    assert ratios == {
        "ours / trainer": (2.22, 2.0),
        "ours tuned / trainer grouped": (1.88, 1.1),
        "ours / trl equal": (3.33, 2.8),
        "ours tuned / trl packing": (2.5, 1.35),
    }
    assert all(each.note == "its lengths" for each in results(data))


def test_without_trl_the_other_thresholds_are_measured() -> None:
    data = measured("lognormal", bare=steps(2), trainer=steps(2), trainer_grouped=steps(1), ours=steps(1))
    assert [each.threshold for each in results(data)] == [2.0, 1.1]


def test_overhead_is_milliseconds_beyond_bare() -> None:
    padded, found = results(measured("tiny", bare=steps(0.004), ours_equal=steps(0.0042), ours=steps(0.0045)))
    assert (found.topic, round(found.spread.median, 3), found.unit, found.is_met) == (1, 0.5, "ms", True)
    assert (round(padded.spread.median, 3), padded.is_aim, found.is_aim) == (0.2, False, True)


def test_memory_is_a_share_of_the_peers() -> None:
    data = measured("memory", trainer=steps(1, peak=2000), trl_equal=steps(1, peak=4000), ours=steps(1, peak=1200))
    shares: list[Result] = memory_results(data)
    assert [(each.spread.median, each.is_met) for each in shares] == [(0.6, False), (0.3, True)]


def test_every_workload_has_results_and_round_trips_through_json() -> None:
    every = [workload for form in Form for workload in workloads(form)]
    assert {each.name for each in every} == {"lognormal", "gsm8k", "fixed", "tiny"}
    for workload in (*every, equivalence(Form.QUICK), memory(Form.QUICK)):
        assert Workload.of(workload.record()) == workload
        assert "ours" in workload.competitors and len(workload.competitors) > 1
    for workload in every:
        assert results(Measured(workload, "", {name: steps(1) for name in workload.competitors}))
    assert all(workload.rounds >= 25 for workload in workloads(Form.FULL))


def test_sizes_are_a_whole_model() -> None:
    values = Sizes().values()
    assert values["hidden_size"] % values["num_attention_heads"] == 0
    assert values["num_attention_heads"] % values["num_key_value_heads"] == 0
