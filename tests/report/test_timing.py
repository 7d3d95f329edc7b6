import pytest

from finetune.report.timing import StartupTimer, ThroughputMeter


def test_each_startup_phase_has_its_own_time_and_the_first_is_the_imports():
    clock, cpu_clock = iter([100.0, 100.0, 103.0]).__next__, iter([6.0, 7.5]).__next__
    startup = StartupTimer(seconds_before=5.0, cpu_before=1.0, clock=clock, cpu_clock=cpu_clock)
    startup.end("data")
    imports, data = startup.phases
    assert (imports.name, imports.seconds, imports.cpu_seconds) == ("imports", 5.0, 5.0)
    assert (data.name, data.seconds, data.cpu_seconds) == ("data", 3.0, 1.5)
    assert data.memory_bytes > 1_000_000
    assert startup.started_at == 100.0


def test_a_part_of_a_phase_can_be_a_phase_of_its_own():
    clock, cpu_clock = iter([100.0, 100.0, 103.0, 113.0, 115.0]).__next__, iter([1.0, 2.0, 5.0, 6.5]).__next__
    startup = StartupTimer(clock=clock, cpu_clock=cpu_clock)
    with startup.phase("longest batch"):
        pass
    startup.end("run folder")
    taken = {phase.name: (phase.seconds, phase.cpu_seconds) for phase in startup.phases}
    assert taken == {"imports": (0.0, 1.0), "longest batch": (10.0, 3.0), "run folder": (5.0, 2.5)}


def test_a_second_run_of_a_process_does_not_begin_with_the_process():
    StartupTimer.from_process_start()
    (imports,) = StartupTimer.from_process_start().phases
    assert imports.seconds == pytest.approx(0.0, abs=0.5)


def test_nothing_is_known_before_the_first_step():
    meter = ThroughputMeter(100)
    assert meter.tokens_per_second == 0.0
    assert meter.seconds_left is None


def test_one_slow_step_does_not_sway_the_pace(take_step):
    meter = ThroughputMeter(100)
    for step in range(1, 10):
        meter.add(take_step(step, num_tokens=1000, seconds=2.0))
    meter.add(take_step(10, num_tokens=1000, seconds=300.0))
    assert meter.tokens_per_second == pytest.approx(500.0)
    assert meter.seconds_left == pytest.approx(90 * 2.0)


@pytest.mark.parametrize(("num_steps", "step", "seconds_left"), [(100, 91, 9 * 2.0), (20, 20, 0.0)])
def test_only_the_steps_that_are_left_take_time(take_step, num_steps, step, seconds_left):
    meter = ThroughputMeter(num_steps)
    meter.add(take_step(step, seconds=2.0))
    assert meter.seconds_left == pytest.approx(seconds_left)
