from collections.abc import Callable
from dataclasses import replace

import pytest

from finetune.report.events import Event, RunStarted, StepTaken

STEP = StepTaken(
    step=20,
    loss=2.31071,
    gradient_norm=1.02,
    learning_rate=9.8e-4,
    num_targets=300,
    num_tokens=1234,
    samples_sha256="ab" * 32,
    epoch=0.5,
    seconds=1.0,
    data_seconds=0.01,
    data_share=0.01,
    memory_bytes=1_200_000_000,
)


@pytest.fixture
def take_step() -> Callable[..., StepTaken]:
    """Return a maker of steps: `take_step(3, loss=1.0)`."""
    return lambda step, **changes: replace(STEP, step=step, **changes)


@pytest.fixture
def started() -> RunStarted:
    return RunStarted(
        step=0,
        num_steps=120,
        strategy="zero2",
        arithmetic=("32 per step = 2 processes x 4 per microbatch x 4 accumulated",),
        config={"train": {"learning_rate": 1e-3, "betas": [0.9, 0.999]}, "hub_token": "canary-secret"},
    )


class Diary:
    """A reporter that remembers what it was told, and fails where it is asked to."""

    def __init__(self, *, fails_on: type[Event] | None = None, fails_on_close: bool = False) -> None:
        self.events: list[Event] = []
        self.is_closed = False
        self._fails_on = fails_on
        self._fails_on_close = fails_on_close

    def __call__(self, event: Event) -> None:
        if self._fails_on is not None and isinstance(event, self._fails_on):
            raise ConnectionError("the tracker's server is gone")
        self.events.append(event)

    def close(self) -> None:
        self.is_closed = True
        if self._fails_on_close:
            raise OSError("disk full")


@pytest.fixture
def diary() -> type[Diary]:
    return Diary
