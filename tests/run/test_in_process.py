"""A run within a caller's process: its numbers, its errors, and what it leaves of the process."""

import hashlib
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState

from finetune.config.load import load_config
from finetune.errors import ConfigError, UserError
from finetune.report.events import Event, StepTaken
from finetune.run.in_process import train_in_process
from finetune.run.state.finished import RunResult, read_run_result
from tests.launching import capture
from tests.small_job import write_job

QUICK = ("train.steps=4", "checkpoint.every_steps=2", "evaluate.every_steps=2")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("in-process"))


def train(job: Path, name: str, *overrides: str, reporters: Any = ()) -> RunResult:
    loaded = load_config(job, [*QUICK, f"run.folder={job.parent / name}", *overrides])
    return train_in_process(loaded, reporters=reporters)


def weights_digest(result: RunResult) -> str:
    assert result.final is not None
    return hashlib.sha256((result.final / "model.safetensors").read_bytes()).hexdigest()


class StepLosses:
    """A reporter that keeps what a step cost."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.is_closed = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepTaken):
            self.losses.append(event.loss)

    def close(self) -> None:
        self.is_closed = True


def test_two_trainings_in_one_process_give_the_numbers_of_two_processes(job):
    """The first has another precision, an adapter and deterministic kernels."""
    first = train(job, "first", "train.precision=bf16", "model.lora={rank: 4}", "run.deterministic=true")
    losses = StepLosses()
    second = train(job, "second", reporters=[losses])
    command_line = capture(
        [sys.executable, "-m", "finetune", "--config", str(job), "--set", f"run.folder={job.parent / 'alone'}"]
        + [word for override in QUICK for word in ("--set", override)]
    )
    assert command_line.returncode == 0, command_line.stderr
    alone = read_run_result(job.parent / "alone")
    assert first.final is not None and (first.final / "adapter_model.safetensors").is_file()
    assert weights_digest(second) == weights_digest(alone)
    assert (second.metrics, second.num_steps) == (alone.metrics, 4)
    assert (second.reason, second.is_finished) == ("finished", True)
    assert second.checkpoint is not None and second.checkpoint.name == alone.checkpoint.name == "step-000004"
    assert len(losses.losses) == 4 and losses.is_closed


def process_state() -> dict[str, Any]:
    """Return what of a process a run could change."""
    logger = logging.getLogger("transformers")
    return {
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "streams": (sys.stdout, sys.stderr),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "warnings": list(warnings.filters),
        "logging": (logging.root.level, list(logging.root.handlers), logger.level, list(logger.filters)),
        "deepspeed": list(logging.getLogger("DeepSpeed").filters),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "group": torch.distributed.is_initialized(),
        "accelerate": (dict(PartialState._shared_state), dict(AcceleratorState._shared_state)),
        "random": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "torch": torch.get_rng_state().tolist(),
    }


@pytest.fixture
def caller() -> Iterator[None]:
    """Give the process settings of a caller's own, an Accelerator among them."""
    before = signal.signal(signal.SIGTERM, lambda *_: None), torch.get_num_threads()
    Accelerator(cpu=True)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before[1])
    signal.signal(signal.SIGTERM, before[0])
    AcceleratorState._reset_state(reset_partial_state=True)


def test_a_run_leaves_the_process_as_it_was(job, caller):
    train(job, "warm")  # imports
    before = process_state()
    children = {thread.name for thread in threading.enumerate()}
    with torch.no_grad():
        train(job, "clean", "run.deterministic=true", "train.precision=bf16", "data.num_workers=1")
        assert not torch.is_grad_enabled()
    after = process_state()
    assert {name for name in before if before[name] != after[name]} == set()
    assert {thread.name for thread in threading.enumerate()} <= children


def test_an_error_is_raised_and_leaves_the_process_as_it_was(job, capsys):
    train(job, "warm-2")
    before = process_state()
    capsys.readouterr()
    with pytest.raises(ConfigError, match="attention heads"):
        train(job, "broken", "model.from_config.values.num_attention_heads=5")
    assert "error:" not in capsys.readouterr().err
    after = process_state()
    assert {name for name in before if before[name] != after[name]} == set()
    assert train(job, "broken").is_finished  # the folder is free, and the failure forgotten


def test_a_finished_run_returns_its_result_again(job):
    assert train(job, "again") == train(job, "again")


def test_a_reporter_that_raises_does_not_end_the_run(job, capsys):
    def fail(event: Event) -> None:
        raise ValueError("no network")

    assert train(job, "reported", reporters=[fail]).is_finished
    assert "no network" in capsys.readouterr().out


def test_a_signal_is_sent_again_once_the_run_has_stopped(job):
    """SIGINT ends in KeyboardInterrupt, SIGTERM in the handler of the caller; both save a checkpoint."""
    received: list[int] = []

    def interrupt_at(step: int, number: signal.Signals) -> Any:
        def watch(event: Event) -> None:
            if isinstance(event, StepTaken) and event.step == step:
                os.kill(os.getpid(), number)

        return watch

    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        result = train(job, "stopped", reporters=[interrupt_at(1, signal.SIGTERM)])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]
    assert (result.reason, result.is_finished, result.final) == ("signal SIGTERM", False, None)
    assert result.checkpoint is not None and result.num_steps < 4
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started pytest may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            train(job, "stopped", reporters=[interrupt_at(3, signal.SIGINT)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert train(job, "stopped").is_finished


def test_a_hang_raises_in_the_main_thread(job):
    def sleep(event: Event) -> None:
        if isinstance(event, StepTaken) and event.step == 2:
            for _ in range(600):
                time.sleep(0.1)

    with pytest.raises(Exception, match="no progress") as raised:
        train(job, "hung", "run.hang_after_seconds=4", reporters=[sleep])
    assert type(raised.value).__name__ == "Hang"


def test_a_command_at_the_end_needs_a_process_of_its_own(job):
    with pytest.raises(UserError, match="num_processes=1"):
        train(job, "hook", "run.on_end=/bin/true")
