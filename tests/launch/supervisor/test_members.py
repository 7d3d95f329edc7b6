"""Who leads and who takes part, decided from what a host sees."""

from dataclasses import replace

from finetune.launch.supervisor.members import (
    ENDED,
    FAILED,
    IDLE,
    RUNNING,
    Attempt,
    Beat,
    Limits,
    View,
    can_save,
    connected_hosts,
    find_leader,
    is_current,
    may_start,
    next_attempt,
)

ALL = ("a", "b", "c")
TWO_OF = Attempt(4, ("a", "b"), ("address-a", "address-b"), 500, "starts", step=100, sessions=("sa", "sb"))


def hosts(*names: str, state: str = RUNNING, attempt: int = 4) -> dict[str, Beat]:
    """Return hosts that all reach one another."""
    return {
        name: Beat(name, f"address-{name}", 1, 500 + number, 7, state, attempt, others, session=f"s{name}")
        for number, name in enumerate(names)
        for others in [tuple(other for other in names if other != name)]
    }


def view(alive: dict[str, Beat], attempt: Attempt | None = TWO_OF, *, step: int = 100, **others: object) -> View:
    return View(alive, attempt, **{"is_patient": False, "checkpoint_step": step, "last_number": 4, **others})  # type: ignore[arg-type]


def test_the_first_attempt_waits_for_more_hosts_than_the_least() -> None:
    limits = Limits(1, 3)
    patient = view(hosts("a", "b", attempt=0), None, is_patient=True)
    assert next_attempt(patient, limits, me="a") is None
    begun = next_attempt(replace(patient, is_patient=False), limits, me="a")
    assert begun is not None and (begun.number, begun.hosts, begun.addresses, begun.sessions) == (
        *(5, ("a", "b")),  # 4 of earlier launches are there
        *(("address-a", "address-b"), ("sa", "sb")),
    )
    assert next_attempt(view(hosts(*ALL, attempt=0), None, is_patient=True), limits, me="a") is not None


def test_no_attempt_starts_with_fewer_hosts_than_the_minimum() -> None:
    assert next_attempt(view(hosts("a"), None), Limits(2, 3), me="a") is None
    assert next_attempt(view(hosts("a")), Limits(2, 3), me="a") is None


def test_a_lost_host_is_left_out_and_a_new_one_joins_at_the_end() -> None:
    without_b = next_attempt(view(hosts("a")), Limits(1, 3), me="a")
    assert without_b is not None and (without_b.hosts, without_b.reason) == (("a",), "b is lost")
    with_c = next_attempt(view(hosts(*ALL)), Limits(1, 3), me="a")
    assert with_c is not None and (with_c.hosts, with_c.reason, with_c.number) == (ALL, "c joined", 5)
    assert next_attempt(view(hosts(*ALL)), Limits(1, 2), me="a") is None  # c is a spare
    replaced = next_attempt(view(hosts("a", "c")), Limits(1, 2), me="a")
    assert replaced is not None and replaced.hosts == ("a", "c")


def test_the_leader_is_the_first_of_the_attempt_that_is_there() -> None:
    assert find_leader(view(hosts(*ALL), replace(TWO_OF, hosts=("b", "a")))) == "b"
    assert find_leader(view(hosts("a", "c"), replace(TWO_OF, hosts=("b", "c")))) == "c"
    assert find_leader(view(hosts("b", "c"), None)) == "b"
    leaving = hosts(*ALL)
    leaving["a"] = replace(leaving["a"], is_leaving=True)
    assert find_leader(view(leaving)) == "b"
    assert find_leader(view({})) is None


def test_hosts_that_do_not_reach_one_another_are_not_launched_together() -> None:
    beats = hosts("a", "b", "c", "d")
    cut = {  # a alone, b c d together; a sees them, they do not see a
        name: replace(beat, reaches=tuple(other for other in beat.reaches if other != "a")) if name != "a" else beat
        for name, beat in beats.items()
    }
    assert connected_hosts(cut, first="a") == ("b", "c", "d")
    halves = hosts("a", "b") | hosts("c", "d")
    assert connected_hosts(halves, first="c") == ("c", "d")
    assert connected_hosts({}, first="a") == ()


def test_among_equal_partitions_the_one_that_trains_continues() -> None:
    beats = hosts(*ALL)  # a comes back from a partition: b sees it already, c does not
    beats["a"] = replace(beats["a"], reaches=("b",))
    beats["c"] = replace(beats["c"], reaches=("b",))
    assert connected_hosts(beats, first="b") == ("b", "a")
    assert connected_hosts(beats, first="b", preferred=("b", "c")) == ("b", "c")
    trains = Attempt(4, ("b", "c"), ("address-b", "address-c"), 501, "a cannot be reached", sessions=("sb", "sc"))
    assert next_attempt(view(beats, trains), Limits(1, 3), me="b") is None


def test_a_failure_on_all_hosts_is_tried_again_as_long_as_steps_are_gained() -> None:
    failed, limits = hosts("a", "b", state=FAILED), Limits(1, 2, max_failures=2)
    again = next_attempt(view(failed), limits, me="a")
    assert again is not None and (again.num_failures, again.exit_code) == (1, None)
    over = next_attempt(view(failed, replace(TWO_OF, num_failures=1)), limits, me="a")
    assert over is not None and over.exit_code == 1
    gained = next_attempt(view(failed, replace(TWO_OF, num_failures=1), step=120), limits, me="a")
    assert gained is not None and (gained.num_failures, gained.exit_code, gained.step) == (0, None, 120)


def test_a_failure_on_one_host_waits_for_the_others_but_not_forever() -> None:
    beats = hosts("a", "b")
    beats["a"] = replace(beats["a"], state=FAILED)
    assert next_attempt(view(beats), Limits(1, 2), me="a") is None
    assert next_attempt(view(beats, is_overdue=True), Limits(1, 2), me="a") is not None


def test_a_mistake_of_the_user_is_not_tried_again() -> None:
    over = next_attempt(view(hosts("a", "b", state=FAILED), user_mistake="train.x: no"), Limits(1, 2), me="a")
    assert over is not None and (over.exit_code, over.reason) == (2, "train.x: no")


def test_the_run_is_over_when_the_last_host_has_ended() -> None:
    beats = hosts("a", "b", state=ENDED)
    beats["b"] = replace(beats["b"], state=RUNNING)
    assert next_attempt(view(beats), Limits(1, 2), me="a") is None
    over = next_attempt(view(hosts("a", "b", state=ENDED)), Limits(1, 2), me="a")
    assert over is not None and over.exit_code == 0
    assert next_attempt(view(hosts("a", "b", state=ENDED), over), Limits(1, 2), me="a") is None


def test_a_host_that_leaves_is_not_waited_for() -> None:
    beats = hosts("a", "b")
    beats["a"] = replace(beats["a"], is_leaving=True)
    begun = next_attempt(view(beats), Limits(1, 2), me="b")
    assert begun is not None and (begun.hosts, begun.reason) == (("b",), "a leaves")
    assert can_save(TWO_OF, beats)


def test_a_host_whose_supervisor_was_started_again_is_not_taken_for_the_old_one() -> None:
    beats = hosts("a", "b")
    beats["b"] = replace(beats["b"], session="new", state=IDLE, attempt=0)
    begun = next_attempt(view(beats), Limits(1, 2), me="a")
    assert begun is not None and (begun.hosts, begun.reason, begun.sessions) == (
        *(("a", "b"), "b was restarted"),
        ("sa", "new"),
    )
    assert not can_save(TWO_OF, beats)


def test_a_host_that_lives_but_cannot_be_reached_is_named_so() -> None:
    beats = {name: replace(beat, reaches=()) for name, beat in hosts("a", "b").items()}
    begun = next_attempt(view(beats), Limits(1, 2), me="a")
    assert begun is not None and (begun.hosts, begun.reason) == (("a",), "b cannot be reached")


def test_ranks_save_only_where_all_ranks_of_their_attempt_are_there() -> None:
    beats = hosts("a", "b")
    assert can_save(TWO_OF, beats)
    assert can_save(TWO_OF, hosts(*ALL))  # c is about to join
    assert not can_save(TWO_OF, hosts("a"))
    assert not can_save(TWO_OF, {name: replace(beat, reaches=()) for name, beat in beats.items()})
    assert not can_save(TWO_OF, beats | {"b": replace(beats["b"], state=FAILED)})
    assert can_save(TWO_OF, beats | {"b": replace(beats["b"], state=FAILED, attempt=3)})


def test_an_attempt_waits_for_all_its_hosts_and_for_every_rank_of_an_earlier_one() -> None:
    ready = hosts("a", "b", state=IDLE)
    assert may_start(TWO_OF, ready)
    assert not may_start(TWO_OF, ready | {"b": replace(ready["b"], attempt=3)})
    assert not may_start(TWO_OF, {"a": ready["a"]})
    late = replace(ready["b"], name="c", state=RUNNING, attempt=3)  # does not take part, and has not ended its ranks
    assert not may_start(TWO_OF, ready | {"c": late})
    assert may_start(TWO_OF, ready | {"c": replace(late, state=IDLE)})
    assert may_start(TWO_OF, ready | {"a": replace(ready["a"], state=RUNNING)})  # one is quicker than the other


def test_an_attempt_of_an_earlier_launch_counts_only_while_one_of_its_supervisors_lives() -> None:
    assert is_current(TWO_OF, hosts("b", attempt=0))
    assert not is_current(TWO_OF, hosts("c", attempt=0))
    again = {"a": replace(hosts("a", attempt=0)["a"], session="new")}
    assert not is_current(TWO_OF, again)
    assert is_current(TWO_OF, hosts("c", attempt=4))  # waits for a place
    assert is_current(TWO_OF, hosts("c", attempt=3))  # the others have just ended the run
    assert not is_current(TWO_OF, hosts("c", attempt=2))
    first = replace(TWO_OF, number=1)
    assert not is_current(first, hosts("c", attempt=0))
