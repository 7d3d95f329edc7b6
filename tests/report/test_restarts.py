"""What restarts have cost, by hand: a run that was killed at step 10, had saved step 6, and came back."""

import pytest

from finetune.report.history import RunHistory
from finetune.report.page.facts import (
    InterruptionCosts,
    advice_line,
    interval_advice,
    restart_facts,
    restart_line,
)
from finetune.report.page.page import report_page
from tests.report.page.events import ended, started, taken

KILLED = {"state": "failed", "reason": "killed", "step": 10, "time": 1012.0}
PRICED = {"device_price": {"usd_per_hour": 2.0, "source": "somebody"}}
CONFIG = {"checkpoint": {"every_steps": 6}}


def saved(step: int, *, stall: float = 0.4) -> dict:
    times = {"seconds": 2.0, "stall_seconds": stall}
    return {"event": "CheckpointSaved", "time": 1000.0 + step, "step": step, "path": "p", "size_bytes": 1, **times}


def started_up(time: float, **seconds: float) -> dict:
    return {"event": "StartedUp", "time": time, "step": 7, "seconds": seconds, "cpu_seconds": {}, "memory_bytes": {}}


def killed_and_resumed(**fields) -> list[dict]:
    """Steps 1 to 9 were logged, 10 was taken; from 1012 to 1100 nothing was there, then 20 s of start-up."""
    return [
        *(started(config=CONFIG), *(taken(step, 1.0) for step in range(1, 10)), saved(6)),
        started(6, time=1119.0, previous=KILLED, processes=4, config=CONFIG, **fields),
        taken(7, 1.0, time=1121.0, seconds=1.0),
        started_up(1121.0, imports=12.0, data=8.0, **{"first step": 1.0}),
        *(taken(step, 1.0, time=1115.0 + step, seconds=1.0) for step in range(8, 13)),
    ]


def history_of(*events: dict) -> RunHistory:
    history = RunHistory()
    history.add(events)
    return history


def test_a_killed_run_costs_waiting_start_up_and_the_steps_after_its_checkpoint():
    facts = restart_facts(history_of(*killed_and_resumed(**PRICED)))
    assert facts == {
        **{"restarts": 1, "interruptions": 1, "steps_redone": 4},  # 7 to 10; 10 is known from status.json alone
        **{"lost_seconds": 112.0, "down_seconds": 88.0, "startup_seconds": 20.0, "redone_seconds": 4.0},
        **{"usd": round(24 / 3600 * 4 * 2.0, 4), "price": "somebody"},
    }


def test_the_restart_line_matches_the_restart_facts():
    line = restart_line(history_of(*killed_and_resumed(**PRICED)))
    parts = "1.5 waiting + 0.3 start-up + 0.1 for 4 repeated steps"
    assert line == f"1 restart: 1.9 min lost = {parts}; about $0.05 (somebody)"
    assert restart_line(history_of(started(), taken(1, 1.0), ended(1))) == ""


def test_restarts_have_no_cost_without_a_price():
    assert restart_facts(history_of(*killed_and_resumed()))["usd"] is None


def test_without_a_status_file_events_alone_are_counted():
    """Of a machine that is gone, only what was uploaded is known."""
    events = killed_and_resumed()
    del events[11]["previous"]
    (restart,) = history_of(*events).restarts.listed
    assert (restart.reason, restart.last_step, restart.steps_redone) == ("killed", 9, 3)
    assert restart.down_seconds == 1100 - 1009


def test_a_requested_stop_is_not_an_interruption_and_a_signal_is_one():
    stops = {}
    for reason in ("time limit", "STOP file", "signal SIGINT", "signal SIGTERM", "spot notice", "Hang"):
        events = [started(), taken(1, 1.0), ended(1, reason, None), started(1, time=3000.0), taken(2, 1.0)]
        stops[reason] = restart_facts(history_of(*events))
    assert [stops[reason]["interruptions"] for reason in stops] == [0, 0, 0, 1, 1, 1]
    assert {facts["steps_redone"] for facts in stops.values()} == {0}


def test_a_step_that_is_taken_a_third_time_counts_twice():
    lives = [event for _ in range(2) for event in (started(2, time=1000.0), taken(3, 1.0), taken(4, 1.0))]
    history = history_of(started(), *(taken(step, 1.0) for step in range(1, 5)), *lives)
    assert (restart_facts(history)["restarts"], restart_facts(history)["steps_redone"]) == (2, 4)


@pytest.mark.parametrize(
    "previous", [{"step": 10**30, "time": 1e300}, {"step": "9", "time": "now"}, {"step": True}, {"reason": ["x"]}]
)
def test_a_damaged_status_changes_nothing(previous: dict):
    events = [started(), taken(1, 1.0), started(1, time=1010.0, previous=previous), taken(2, 1.0, time=1011.0)]
    facts = restart_facts(history_of(*events))
    assert (facts["restarts"], facts["steps_redone"], facts["lost_seconds"]) == (1, 0, 9.0)


def test_there_is_advice_only_where_something_was_measured():
    assert interval_advice(history_of(started(), taken(1, 1.0), saved(1)), hours_stated=None) is None
    assert interval_advice(history_of(started(), taken(1, 1.0)), hours_stated=6.0) is None
    assert interval_advice(history_of(started(), saved(1)), hours_stated=6.0) is None
    assert interval_advice(history_of(*killed_and_resumed()), hours_stated=None) is not None


BEST = "saving then adds 0.1%, an interruption loses 2.5 min of steps on average"
SENTENCES = {
    5000: f"save every 600 steps (now 5,000): {BEST}",
    None: f"save every 600 steps (now only at the end): {BEST}",
    500: "checkpoint.every_steps: 500 is right",
}


@pytest.mark.parametrize("every", SENTENCES)
def test_the_checkpoint_interval_advice_is_one_line(every: int | None):
    config = {"checkpoint": {"every_steps": every}}
    history = history_of(started(config=config), *(taken(step, 1.0) for step in (1, 2)), saved(2))
    line = advice_line(interval_advice(history, hours_stated=6.0))
    assert line == f"a save costs 0.4 s; with an interruption every 6 h (stated), {SENTENCES[every]}"


def test_the_status_is_written_only_when_it_changes():
    written: list[dict] = []
    costs = InterruptionCosts(written.append, hours_stated=6.0)
    history = history_of(*killed_and_resumed())
    costs(history)
    costs(history)
    assert len(written) == 1
    assert written[0].keys() == {"restarts", "checkpoint_interval"}
    assert len(costs.lines) == 2


def test_the_page_has_the_cost_of_interruptions(tmp_path):
    page = report_page(tmp_path, history_of(*killed_and_resumed()))
    assert "<h2>Interruptions</h2>" in page and "1 restart: 1.9 min lost" in page
    assert "<h2>Interruptions</h2>" not in report_page(tmp_path, history_of(started(), taken(1, 1.0)))
