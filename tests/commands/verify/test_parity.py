"""The parity table compares runs step by step."""

import pytest

from finetune.commands.verify.runs import LaunchSetup, compare_steps
from finetune.report.history import Steps

DDP = LaunchSetup("ddp", None, 2, 1)


def steps(losses, norms):
    history = Steps()
    for number, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1):
        history.add({"step": number, "loss": loss, "gradient_norm": norm})
    return history


def test_equal_traces_are_equal():
    trace = steps((4.0, 3.0), (1.0, 0.5))
    assert compare_steps(DDP, expected=trace, actual=trace, tolerance=1e-4).verdict == "equal"


def test_the_first_step_beyond_the_tolerance_is_reported():
    expected, actual = steps((4.0, 3.0, 2.0), (1.0, 1.0, 1.0)), steps((4.0, 3.001, 2.0), (1.0, 1.0, 1.0))
    compared = compare_steps(DDP, expected=expected, actual=actual, tolerance=1e-4)
    assert compared.first_bad_step == 2
    assert round(compared.loss_difference, 6) == round(0.001 / 3, 6)


def test_a_run_that_took_fewer_steps_is_not_equal():
    compared = compare_steps(DDP, expected=steps((4.0, 3.0), (1.0, 1.0)), actual=steps((4.0,), (1.0,)), tolerance=1e-4)
    assert compared.first_bad_step == 2


@pytest.mark.parametrize(("loss", "norm"), [(float("nan"), 1.0), (4.0, float("nan"))])
def test_a_nan_loss_or_norm_is_never_equal(loss, norm):
    expected, actual = steps((4.0,), (1.0,)), steps((loss,), (norm,))
    assert compare_steps(DDP, expected=expected, actual=actual, tolerance=1e-4).first_bad_step == 1
