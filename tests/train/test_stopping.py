"""A stop is requested on one rank and agreed by all; early stopping keeps its state in the progress."""

import math
import signal

import pytest

from finetune.config.sections.train import EarlyStoppingSection
from finetune.errors import UserError
from finetune.runtime.progress import Cadence, NeverDue, Progress
from finetune.runtime.supervision.signals import ReceivedSignals
from finetune.train.stopping import (
    FAILED_SAVE,
    STOP_FILE,
    TIME_LIMIT,
    EarlyStopping,
    StopFile,
    StopRequest,
    StopSources,
    remove_stop_file,
    stop_request_of,
)
from tests.refusals import refused


def test_a_signal_on_one_rank_is_the_stop_reason_of_all_ranks():
    calm, told = ReceivedSignals(), ReceivedSignals()
    told.note(signal.SIGTERM, None)
    added = [sum(column) for column in zip(StopSources(calm).counts(), StopSources(told).counts(), strict=True)]
    assert stop_request_of(added) == StopRequest("signal SIGTERM", saves=True)
    assert stop_request_of(StopSources(calm).counts()) == StopRequest(None, saves=False)


def test_a_request_to_save_and_continue_counts_once():
    note = ReceivedSignals()
    note.note(signal.SIGUSR1, None)
    sources = StopSources(note)
    assert [stop_request_of(sources.counts()) for _ in range(2)] == [
        StopRequest(None, saves=True),
        StopRequest(None, saves=False),
    ]


def test_a_run_with_a_failed_save_stops_without_another_save():
    assert stop_request_of(StopSources(ReceivedSignals(), {FAILED_SAVE: lambda: True}).counts()) == StopRequest(
        FAILED_SAVE, saves=False
    )


def test_a_signal_takes_precedence_over_other_stop_requests():
    note = ReceivedSignals()
    sources = StopSources(note, dict.fromkeys((STOP_FILE, TIME_LIMIT), lambda: True))
    assert stop_request_of(sources.counts()).stop_reason == STOP_FILE
    note.note(signal.SIGHUP, None)
    assert stop_request_of(sources.counts()).stop_reason == "signal SIGHUP"


def test_the_stop_file_is_looked_for_once_a_second(tmp_path):
    now = [0.0]
    stop = StopFile(tmp_path / "STOP", clock=lambda: now[0])
    assert not stop()
    (tmp_path / "STOP").touch()
    now[0] = 0.9
    assert not stop()
    now[0] = 1.0
    assert stop()


def test_early_stopping_waits_for_its_patience():
    stopping, progress, over = EarlyStopping(EarlyStoppingSection(metric="loss", patience=2)), Progress(), []
    for loss in (1.0, 0.9, 0.95, 0.91):
        stopping.update({"loss": loss}, progress)
        over.append(stopping.is_over(progress))
    assert over == [False, False, False, True]
    assert progress.best_metric == 0.9


def test_early_stopping_continues_counting_after_a_resume():
    section = EarlyStoppingSection(metric="exact_match", goal="maximize", patience=2)
    progress = Progress()
    for value in (0.5, 0.4):
        EarlyStopping(section).update({"exact_match": value}, progress)
    resumed = Progress.from_state_dict(progress.state_dict())
    EarlyStopping(section).update({"exact_match": 0.45}, resumed)
    assert EarlyStopping(section).is_over(resumed)


def test_an_early_stopping_metric_that_is_not_measured_is_rejected():
    section = EarlyStoppingSection(metric="entity_f1", goal="maximize", patience=2)
    with refused(UserError, "`entity_f1`", "loss, accuracy"):
        EarlyStopping(section).update({"loss": 1.0, "accuracy": 0.5}, Progress())


def test_any_metric_is_better_than_nan():
    section = EarlyStoppingSection(metric="pearson", goal="maximize", patience=2)
    progress = Progress()
    for value in (math.nan, 0.2):
        EarlyStopping(section).update({"pearson": value}, progress)
    assert (progress.best_metric, progress.evaluations_since_best) == (0.2, 0)


def test_cadence_is_due_on_its_beat_and_at_the_last_step():
    assert [step for step in range(1, 11) if Cadence(4, 10).due(step)] == [4, 8, 10]
    assert [step for step in range(1, 11) if Cadence(None, 10).due(step)] == [10]
    assert not any(NeverDue().due(step) for step in range(1, 11))


MAKE = [
    lambda path: path.write_text(""),
    lambda path: path.mkdir(),
    lambda path: path.symlink_to("nowhere"),
    lambda path: None,
]


@pytest.mark.parametrize("make", MAKE)
def test_a_stop_that_was_obeyed_is_removed(tmp_path, make):
    make(tmp_path / "STOP")
    logged = []
    remove_stop_file(tmp_path / "STOP", log=logged.append)
    assert list(tmp_path.iterdir()) == [] and logged == []


def test_a_non_empty_folder_named_stop_is_kept_and_logged(tmp_path):
    (tmp_path / "STOP" / "mine").mkdir(parents=True)
    logged = []
    remove_stop_file(tmp_path / "STOP", log=logged.append)
    assert (tmp_path / "STOP" / "mine").is_dir()
    assert logged[0].startswith(f"{tmp_path}/STOP cannot be removed") and "the next start stops" in logged[0]
