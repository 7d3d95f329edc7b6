import pytest

from finetune.runtime.startup import StartUp


def test_each_phase_has_its_own_time_and_what_came_before_is_the_imports():
    clock, cpu_clock = iter([100.0, 100.0, 103.0]).__next__, iter([6.0, 7.5]).__next__
    startup = StartUp(seconds_before=5.0, cpu_before=1.0, clock=clock, cpu_clock=cpu_clock)
    startup.end("data")
    imports, data = startup.phases
    assert (imports.name, imports.seconds, imports.cpu_seconds) == ("imports", 5.0, 5.0)
    assert (data.name, data.seconds, data.cpu_seconds) == ("data", 3.0, 1.5)
    assert data.memory_bytes > 1_000_000
    assert startup.began_at == 100.0


def test_a_second_run_of_a_process_does_not_begin_with_the_process():
    StartUp.of_process()
    (imports,) = StartUp.of_process().phases
    assert imports.seconds == pytest.approx(0.0, abs=0.5)
