"""Stopping is asked for on one rank and agreed by all; early stopping keeps its memory in the progress."""

import signal

from finetune.config.sections.train import EarlyStoppingSection
from finetune.runtime.cadence import Cadence, Never
from finetune.runtime.progress import Progress
from finetune.runtime.signals import SignalNote, noted_signals
from finetune.train.stopping import REASONS, EarlyStopping, Wishes, agreed_reason


def test_a_signal_on_one_rank_is_everybodys_reason():
    calm, told = SignalNote(), SignalNote()
    told.note(signal.SIGTERM, None)
    counts = [Wishes(note, None).counts() for note in (calm, told)]
    added = [sum(column) for column in zip(*counts, strict=True)]
    assert agreed_reason(added) == "signal SIGTERM"
    assert agreed_reason([0] * len(REASONS)) is None


def test_the_time_limit_is_read_from_the_clock():
    now = [0.0]
    wishes = Wishes(SignalNote(), 60.0, clock=lambda: now[0], started=0.0)
    assert agreed_reason(wishes.counts()) is None
    now[0] = 60.0
    assert agreed_reason(wishes.counts()) == "time limit"


def test_signals_leave_a_note_and_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with noted_signals() as note:
        signal.raise_signal(signal.SIGTERM)
        assert note.received is signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_early_stopping_waits_for_its_patience():
    stopping, progress, over = EarlyStopping(EarlyStoppingSection(metric="loss", patience=2)), Progress(), []
    for loss in (1.0, 0.9, 0.95, 0.91):
        stopping.note({"loss": loss}, progress)
        over.append(stopping.is_over(progress))
    assert over == [False, False, False, True]
    assert progress.best_metric == 0.9


def test_early_stopping_goes_on_counting_after_a_resume():
    section = EarlyStoppingSection(metric="exact_match", goal="maximize", patience=2)
    progress = Progress()
    for value in (0.5, 0.4):
        EarlyStopping(section).note({"exact_match": value}, progress)
    resumed = Progress.from_state_dict(progress.state_dict())
    EarlyStopping(section).note({"exact_match": 0.45}, resumed)
    assert EarlyStopping(section).is_over(resumed)


def test_cadence_is_due_on_its_beat_and_at_the_last_step():
    assert [step for step in range(1, 11) if Cadence(4, 10).due(step)] == [4, 8, 10]
    assert [step for step in range(1, 11) if Cadence(None, 10).due(step)] == [10]
    assert not any(Never().due(step) for step in range(1, 11))
