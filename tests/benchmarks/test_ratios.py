from contest.controller import Sheet
from contest.finding import Finding
from contest.ratios import Played, differing, findings, memory_findings
from contest.workloads import Sizes, Workload, equivalence, memory, workloads


def sheet(seconds: float, *, tokens: int = 100, losses: tuple[float, ...] = (2.0, 1.0), peak: int = 1000) -> Sheet:
    return Sheet([seconds] * 3, [tokens] * 3, [tokens] * 3, list(losses), peak)


def played(name: str, **sheets: Sheet) -> Played:
    workload = Workload(name, "a title", tuple(sheets), 3)
    return Played(workload, "its lengths", {each.replace("_", " "): told for each, told in sheets.items()})


def test_samples_that_differ_are_compared_by_their_tokens() -> None:
    told = played("lognormal", trainer=sheet(2.0, tokens=100), ours_tuned=sheet(1.0, tokens=150))
    assert told.speed("ours tuned", "trainer").median == 3


def test_losses_that_differ_are_named_with_how_much() -> None:
    told = played(
        "equivalence",
        bare=sheet(1, losses=(2.0, 1.0)),
        trainer=sheet(1, losses=(2.0, 1.000001)),
        ours=sheet(1, losses=(2.0, 1.1)),
    )
    assert set(differing(told, among=("trainer", "ours"))) == {"ours"}
    assert differing(told, among=("trainer",)) == {}


def test_a_loss_that_is_no_number_differs() -> None:
    told = played("equivalence", bare=sheet(1), ours=sheet(1, losses=(2.0, float("nan"))))
    assert set(differing(told, among=("ours",))) == {"ours"}


def test_gate_2_takes_each_ones_best() -> None:
    told = played(
        "lognormal",
        bare=sheet(2),
        trainer=sheet(2),
        trainer_grouped=sheet(1.5),
        trl_equal=sheet(3),
        trl_packing=sheet(2),
        trl_grouped=sheet(2.5),
        ours=sheet(0.9),
        ours_tuned=sheet(0.8),
    )
    ratios = {
        each.what.partition("CPU-second, ")[2]: (round(each.spread.median, 2), each.limit) for each in findings(told)
    }
    assert ratios == {
        "ours / trainer": (2.22, 2.0),
        "ours tuned / trainer grouped": (1.88, 1.6),
        "ours / trl equal": (3.33, 2.8),
        "ours tuned / trl packing": (2.5, 2.3),
    }
    assert all(each.note == "its lengths" for each in findings(told))


def test_without_trl_the_other_gates_are_measured() -> None:
    told = played("lognormal", bare=sheet(2), trainer=sheet(2), trainer_grouped=sheet(1), ours=sheet(1))
    assert [each.limit for each in findings(told)] == [2.0, 1.6]


def test_overhead_is_milliseconds_beyond_bare() -> None:
    padded, found = findings(played("tiny", bare=sheet(0.004), ours_equal=sheet(0.0042), ours=sheet(0.0045)))
    assert (found.gate, round(found.spread.median, 3), found.unit, found.is_met) == (1, 0.5, "ms", True)
    assert (round(padded.spread.median, 3), padded.is_aim, found.is_aim) == (0.2, False, True)


def test_memory_is_a_share_of_the_peers() -> None:
    told = played("memory", trainer=sheet(1, peak=2000), trl_equal=sheet(1, peak=4000), ours=sheet(1, peak=1200))
    shares: list[Finding] = memory_findings(told)
    assert [(each.spread.median, each.is_met) for each in shares] == [(0.6, False), (0.3, True)]


def test_every_workload_says_something_and_survives_json() -> None:
    every = [*workloads(is_quick=True), *workloads(is_quick=False)]
    assert {each.name for each in every} == {"lognormal", "gsm8k", "fixed", "tiny", "text", "vocabulary", "lora"}
    for workload in (*every, equivalence(), memory()):
        assert Workload.of(workload.record()) == workload
        assert "ours" in workload.contestants and len(workload.contestants) > 1
    for workload in every:
        assert findings(Played(workload, "", {name: sheet(1) for name in workload.contestants}))
    assert all(workload.rounds >= 25 for workload in workloads(is_quick=False))


def test_sizes_are_a_whole_model() -> None:
    values = Sizes().values()
    assert values["hidden_size"] % values["num_attention_heads"] == 0
    assert values["num_attention_heads"] % values["num_key_value_heads"] == 0
