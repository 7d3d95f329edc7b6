"""finetune as the comparison runs it: the one module here that uses more of it than its commands."""

import gc
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from finetune.checkpoint.format.manifest import RunFingerprint
from finetune.checkpoint.read.checksum_prefetch import ChecksumPrefetch
from finetune.checkpoint.read.load import find_checkpoint, load_checkpoint
from finetune.checkpoint.sharding.access import build_access
from finetune.checkpoint.write.saver import SavedCheckpoint, Saver
from finetune.config.load import LoadedConfig, load_config
from finetune.config.sections.checkpoint import CheckpointSection
from finetune.data.loader import train_loader
from finetune.report.reporter import RunLog
from finetune.run.context import RunContext
from finetune.run.setup.accelerator import PreparedModel, make_accelerator
from finetune.run.setup.build import prepare_model
from finetune.run.setup.components import make_evaluator
from finetune.run.setup.strategy import launched_strategy
from finetune.run.setup.training_data import TrainingData, prepare_data
from finetune.run.train import train_from_config
from finetune.runtime import distributed
from finetune.runtime.optional import no_op
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
    fault_point, take_step = step.fault_point, loop.take_step

    def observed_point(point: str, **where: Any) -> bool:
        if point == "data":
            begin()
        elif point in PHASES:
            phase(PHASES[point])
        return fault_point(point, **where)

    def taking(*parts: Any, **named: Any) -> Any:
        record = take_step(*parts, **named)
        end(record)
        return record

    with (
        patch.object(step, "fault_point", observed_point),
        patch.object(loop, "take_step", taking),
    ):
        yield


def train(job: Path, overrides: Sequence[str] = (), *, resumes: bool = False) -> None:
    """Train the job, from the start unless it resumes; the process and its group of ranks live on."""
    loaded = load_config(job, overrides)
    if distributed.is_main() and not resumes:
        shutil.rmtree(loaded.config.run.folder, ignore_errors=True)
    with patch.object(distributed, "shut_down", _stay):
        code = train_from_config(loaded)
    if code != 0:
        raise RuntimeError(f"{job}: exit code {code}")
    if not distributed.is_distributed():
        for state in (GradientState, AcceleratorState, PartialState):  # the next job builds its own
            state._reset_state()
    gc.collect()


def _stay(code: int, **_: object) -> int:
    """Take the place of `shut_down`: the others are waited for, and the process group stays."""
    if distributed.is_distributed():
        torch.distributed.barrier()
    return code


@dataclass(frozen=True)
class Built:
    """A job whose data is prepared and whose model and optimizer are built, as a run builds them."""

    loaded: LoadedConfig
    training_data: TrainingData
    prepared: PreparedModel

    def evaluator(self) -> Callable[[], float]:
        """Return what evaluates the model as a run does, and returns the mean loss."""
        evaluator = make_evaluator(
            self.loaded.config,
            self.training_data.task,
            rows=self.training_data.validation_set,
            model=self.prepared.model,
            accelerator=self.prepared.accelerator,
            tokenizer=self.training_data.tokenizer,
            answer_metrics={},
            reporter=no_op,
        )
        return lambda: evaluator(0)["loss"]

    def saver(self, folder: Path, *, on_saved: Callable[[SavedCheckpoint], None]) -> Saver:
        """Return what saves checkpoints to the folder, in the background."""
        return Saver(
            folder,
            section=CheckpointSection(),
            access=build_access(self.prepared.accelerator, self.prepared.model, self.prepared.optimizer),
            run=RunFingerprint({}, {}, {}),
            on_saved=on_saved,
            warn=lambda step, message: None,
        )

    def resume(self, folder: Path, *, checksums: ChecksumPrefetch | None) -> None:
        """Find, verify and load the newest checkpoint of the folder."""
        checksums = checksums or ChecksumPrefetch()
        access = build_access(self.prepared.accelerator, self.prepared.model, self.prepared.optimizer)
        checkpoint = find_checkpoint(folder, resume="auto", log=lambda _: None, checksum_of=checksums.checksum)
        assert checkpoint is not None, "it has been saved before"
        load_checkpoint(checkpoint, access=access, cached_bytes=checksums.cached_bytes)
        checksums.clear()

    def take_step(self) -> None:
        """Take a step on random tokens, so that there is optimizer state."""
        prepared = self.prepared
        tokens = torch.randint(0, 100, (1, 16), device=prepared.accelerator.device)
        prepared.accelerator.backward(prepared.model(input_ids=tokens, labels=tokens).loss)
        prepared.optimizer.step()
        prepared.optimizer.zero_grad()

    def checksum(self) -> float:
        """Return a number that differs where parameters or optimizer state differ."""
        inner = getattr(self.prepared.optimizer, "optimizer", self.prepared.optimizer)
        total = 0.0
        for parameter in self.prepared.model.parameters():
            for tensor in (parameter.detach(), *inner.state[parameter].values()):
                total += float(tensor.double().abs().sum())
        return total


def build(job: Path, overrides: Sequence[str] = ()) -> Built:
    """Return the job, built. Collective."""
    context = make_context_of(job, overrides)
    data = prepare_data(context)
    accelerator = make_accelerator(context.config, context.strategy, log=context.log)
    prepared = prepare_model(
        context.loaded,
        context.strategy,
        data,
        accelerator=accelerator,
        log=context.log,
        trains=False,
    )
    return Built(context.loaded, data.training_data, prepared)


def make_context_of(job: Path, overrides: Sequence[str] = ()) -> RunContext:
    """Return the context of the job under the launched strategy."""
    loaded = load_config(job, overrides)
    return RunContext(loaded, launched_strategy(loaded), RunLog(is_main=distributed.is_main()))


def samples_of(job: Path) -> Any:
    """Return the job's training samples, tokenized and in the order of its file."""
    return prepare_data(make_context_of(job)).training_data.training.samples


def loaders(job: Path, *, num_steps: int) -> Callable[[int], Any]:
    """Return what gives the prepared loader of the job's batches from a step on."""
    context = make_context_of(job, [f"train.steps={num_steps}", "data.shuffle=true"])
    config, training_data = context.config, prepare_data(context).training_data
    accelerator = make_accelerator(context.config, context.strategy, log=context.log)
    batches = partial(
        train_loader,
        training_data.training,
        training_data.task.collate,
        global_batch_size=config.train.global_batch_size,
        microbatch_size=config.train.microbatch_size,
        num_steps=num_steps,
        section=config.data,
    )
    return lambda first_step: accelerator.prepare_data_loader(batches(first_step=first_step))


def run_folder(folder: Path) -> str:
    """Return the override that makes the folder the run's."""
    return f"run.folder={json.dumps(str(folder))}"
