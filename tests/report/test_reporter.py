from finetune.report.events import Event, Noted, StepTaken, Warned
from finetune.report.reporter import FanOut


def test_a_failing_reporter_is_dropped_with_a_warning_to_the_others(diary, take_step):
    steady, broken = diary(), diary(fails_on=StepTaken)
    reporter = FanOut([broken, steady])
    reporter(take_step(1))
    reporter(take_step(2))
    assert [type(event) for event in steady.events] == [StepTaken, Warned, StepTaken]
    warning = steady.events[1]
    assert warning.step == 1
    assert "Diary failed" in warning.message and "the tracker's server is gone" in warning.message
    assert broken.events == [] and broken.is_closed


def test_a_reporter_that_fails_on_the_warning_itself_is_dropped_too(diary, take_step):
    steady = diary()
    reporter = FanOut([diary(fails_on=StepTaken), diary(fails_on=Warned), steady])
    reporter(take_step(1))
    assert [type(event) for event in steady.events] == [StepTaken, Warned, Warned]


def test_a_run_continues_after_every_reporter_failed(diary):
    reporter = FanOut([diary(fails_on=Event)])
    reporter(Noted(1, "hello"))
    reporter(Noted(2, "is anybody there?"))
    reporter.close()


def test_a_reporter_that_fails_to_close_is_reported_to_the_open_ones(diary):
    first, last = diary(), diary(fails_on_close=True)
    FanOut([first, last]).close()
    assert [type(event) for event in first.events] == [Warned]
    assert first.is_closed and last.is_closed


def test_a_function_is_a_reporter_and_named_in_the_warning_about_it(diary, take_step):
    def plot(event):
        raise ValueError("no axes")

    steady = diary()
    reporter = FanOut([steady, plot])
    reporter(take_step(1))
    reporter.close()
    assert steady.events[1].message == "plot failed and is disabled: ValueError: no axes"
