"""finetune as the comparison runs it: the one module here that uses more of it than its commands."""

import gc
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from finetune.checkpoint.access import build_access
from finetune.checkpoint.ahead import Ahead
from finetune.checkpoint.checkpointer import Checkpointer
from finetune.checkpoint.facts import RunFacts
from finetune.config.load import LoadedConfig, load_config
from finetune.config.sections.checkpoint import CheckpointSection
from finetune.data.loader import train_loader
from finetune.report.announcer import Announcer
from finetune.report.reporter import NullReporter
from finetune.run.evaluator import make_evaluator
from finetune.run.lessons import Lessons, make_lessons
from finetune.run.machine import Machine, make_accelerator, make_machine
from finetune.run.training import launched_strategy, train_from_config
from finetune.runtime import ranks
from finetune.strategy.cpu import gloo_bridge
from finetune.train import loop, step

PHASES: Mapping[str, str] = {"forward": "forward", "backward": "backward", "update.after": "update"}
"""Points of a step, and the phases that end there."""


@contextmanager
def observed(
    *,
    begin: Callable[[], object],
    end: Callable[[Any], object] = lambda record: None,
    phase: Callable[[str], object] = lambda name: None,
) -> Iterator[None]:
    """Have every step call `begin` when its data has come, `phase` when a phase ends, and `end` with its record."""
    of_loop, of_step, take_step = loop.reach, step.reach, loop.take_step

    def data_point(point: str, **where: Any) -> bool:
        if point == "data":
            begin()
        return of_loop(point, **where)

    def phase_point(point: str, **where: Any) -> bool:
        if point in PHASES:
            phase(PHASES[point])
        return of_step(point, **where)

    def taking(*parts: Any, **named: Any) -> Any:
        record = take_step(*parts, **named)
        end(record)
        return record

    with (
        patch.object(loop, "reach", data_point),
        patch.object(step, "reach", phase_point),
        patch.object(loop, "take_step", taking),
    ):
        yield


def train(job: Path, overrides: Sequence[str] = ()) -> None:
    """Train the job from the start; the process and its group of ranks live on."""
    loaded = load_config(job, overrides)
    if ranks.is_main():
        shutil.rmtree(loaded.config.run.folder, ignore_errors=True)
    with patch.object(ranks, "leave", _stay):
        code = train_from_config(loaded)
    if code != 0:
        raise RuntimeError(f"{job}: exit code {code}")
    if not ranks.is_distributed():
        for state in (GradientState, AcceleratorState, PartialState):  # the next job builds its own
            state._reset_state()
    gc.collect()


def _stay(code: int, **_: object) -> int:
    """Take the place of `ranks.leave`: the others are waited for, and the group goes on."""
    if ranks.is_distributed():
        torch.distributed.barrier()
    return code


def gloo_for(strategy: str) -> AbstractContextManager[None]:
    """Return the context in which Accelerate builds FSDP and DeepSpeed on a machine without a GPU."""
    assert strategy != "ddp", "DDP needs no bridge"
    return gloo_bridge()


@dataclass(frozen=True)
class Built:
    """A job whose data is prepared and whose model and optimizer are built, as a run builds them."""

    loaded: LoadedConfig
    lessons: Lessons
    machine: Machine

    def evaluator(self) -> Callable[[], float]:
        """Return what evaluates the model as a run does, and returns the mean loss."""
        evaluator = make_evaluator(
            self.loaded.config,
            self.lessons.task,
            rows=self.lessons.validation_set,
            model=self.machine.model,
            accelerator=self.machine.accelerator,
            tokenizer=self.lessons.tokenizer,
            answer_metrics={},
            reporter=NullReporter(),
        )
        return lambda: evaluator(0)["loss"]

    def checkpointer(
        self, folder: Path, *, prefetched: Ahead | None = None, is_asynchronous: bool = True
    ) -> Checkpointer:
        """Return what saves and finds checkpoints in the folder."""
        return Checkpointer(
            folder,
            section=CheckpointSection(asynchronous=is_asynchronous),
            access=build_access(self.machine.accelerator, self.machine.model, self.machine.optimizer),
            run=RunFacts({}, {}, {}),
            say=lambda _: None,
            ahead=prefetched,
        )

    def take_step(self) -> None:
        """Take a step on random tokens, so that there is optimizer state."""
        machine = self.machine
        tokens = torch.randint(0, 100, (1, 16), device=machine.accelerator.device)
        machine.accelerator.backward(machine.model(input_ids=tokens, labels=tokens).loss)
        machine.optimizer.step()
        machine.optimizer.zero_grad()

    def checksum(self) -> float:
        """Return a number that differs where parameters or optimizer state differ."""
        inner = getattr(self.machine.optimizer, "optimizer", self.machine.optimizer)
        total = 0.0
        for parameter in self.machine.model.parameters():
            for tensor in (parameter.detach(), *inner.state[parameter].values()):
                total += float(tensor.double().abs().sum())
        return total


def build(job: Path, overrides: Sequence[str] = ()) -> Built:
    """Return the job, built. Collective."""
    loaded, log = load_config(job, overrides), Announcer(is_main=False)
    config, strategy = loaded.config, launched_strategy(loaded)
    lessons = make_lessons(config, log)
    accelerator = make_accelerator(config, strategy)
    machine = make_machine(config, strategy, accelerator=accelerator, lessons=lessons, learning_rate=1e-3, say=log)
    return Built(loaded, lessons, machine)


def samples_of(job: Path) -> Any:
    """Return the job's training samples, tokenised and in the order of its file."""
    return make_lessons(load_config(job).config, Announcer(is_main=True)).training.samples


def loaders(job: Path, *, num_steps: int) -> Callable[[int], Any]:
    """Return what gives the prepared loader of the job's batches from a step on."""
    loaded = load_config(job, [f"train.steps={num_steps}", "data.shuffle=true"])
    config, lessons = loaded.config, make_lessons(loaded.config, Announcer(is_main=False))
    accelerator = make_accelerator(config, launched_strategy(loaded))
    batches = partial(
        train_loader,
        lessons.training,
        lessons.task.collate,
        global_batch_size=config.train.global_batch_size,
        microbatch_size=config.train.microbatch_size,
        num_steps=num_steps,
        section=config.data,
    )
    return lambda first_step: accelerator.prepare_data_loader(batches(first_step=first_step))


def run_folder(folder: Path) -> str:
    """Return the override that makes the folder the run's."""
    return f"run.folder={json.dumps(str(folder))}"
