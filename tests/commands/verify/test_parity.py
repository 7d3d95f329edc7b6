"""The parity table compares traces step by step."""

from finetune.commands.verify.runs import LaunchSetup, Trace, compare_traces

DDP = LaunchSetup("ddp", None, 2, 1)


def test_equal_traces_are_equal():
    trace = Trace((4.0, 3.0), (1.0, 0.5))
    assert compare_traces(DDP, expected=trace, actual=trace, tolerance=1e-4).is_equal


def test_the_first_step_beyond_the_tolerance_is_reported():
    expected, actual = Trace((4.0, 3.0, 2.0), (1.0, 1.0, 1.0)), Trace((4.0, 3.001, 2.0), (1.0, 1.0, 1.0))
    compared = compare_traces(DDP, expected=expected, actual=actual, tolerance=1e-4)
    assert compared.first_bad_step == 2
    assert round(compared.loss_difference, 6) == round(0.001 / 3, 6)


def test_a_run_that_took_fewer_steps_is_not_equal():
    compared = compare_traces(DDP, expected=Trace((4.0, 3.0), (1.0, 1.0)), actual=Trace((4.0,), (1.0,)), tolerance=1e-4)
    assert compared.first_bad_step == 2


def test_a_nan_loss_is_never_equal():
    actual = Trace((float("nan"),), (1.0,))
    assert compare_traces(DDP, expected=Trace((4.0,), (1.0,)), actual=actual, tolerance=1e-4).first_bad_step == 1
