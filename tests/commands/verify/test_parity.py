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


NAN = float("nan")
EXPECTED = steps((4.0, 3.0, 2.0), (1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("losses", "norms", "first_bad_step"),
    [
        ((4.0, 3.0, 2.0), (1.0, 1.0, 1.0), None),
        ((4.0, 3.001, 2.0), (1.0, 1.0, 1.0), 2),
        ((4.0,), (1.0,), 2),  # a run that took fewer steps
        ((NAN, 3.0, 2.0), (1.0, 1.0, 1.0), 1),
        ((4.0, 3.0, 2.0), (NAN, 1.0, 1.0), 1),
    ],
)
def test_the_first_step_beyond_the_tolerance_is_reported(losses, norms, first_bad_step):
    compared = compare_steps(DDP, expected=EXPECTED, actual=steps(losses, norms), tolerance=1e-4)
    assert compared.first_bad_step == first_bad_step
    assert (compared.verdict == "equal") is (first_bad_step is None)


def test_differences_of_losses_are_relative():
    compared = compare_steps(DDP, expected=steps((3.0,), (1.0,)), actual=steps((3.001,), (1.0,)), tolerance=1e-4)
    assert round(compared.loss_difference, 6) == round(0.001 / 3, 6)
