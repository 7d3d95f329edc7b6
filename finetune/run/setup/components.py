"""The components of the training loop: batches, update, evaluation, saver, stop sources, and the times of the start.

With `report.sample_ids`, the samples that each step has consumed are recorded, in a file per rank in the run folder.
"""

import json
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from finetune.checkpoint.sharding.access import build_access
from finetune.checkpoint.write.saver import SavedCheckpoint, Saver
from finetune.config.plugins import used_entries
from finetune.config.run_config import RunConfig
from finetune.config.sections.evaluate import EvaluateSection
from finetune.config.sections.train import TrainSection
from finetune.data.batch import Batch
from finetune.data.loader import StepLoader, evaluation_loader, train_loader
from finetune.data.templates.chat_template import stop_ids
from finetune.data.token_cache.integrity import SampleVerifier
from finetune.errors import FULL, RegistryError
from finetune.model.batch_norm import GhostBatchNorm, sync_batch_norm, update_running_statistics
from finetune.report.events import CheckpointSaved, Noted, StartedUp, Warned
from finetune.report.gpu import DeviceColumns
from finetune.report.reporter import CallbackReporter, Reporter
from finetune.report.timing import StartupTimer
from finetune.run.setup.accelerator import PreparedModel, own_batches
from finetune.run.setup.build import BuiltRun, RestoredRun
from finetune.run.setup.strategy import require_sliceable_model
from finetune.runtime import distributed
from finetune.runtime.files import atomic
from finetune.runtime.optional import no_op
from finetune.runtime.parallel import sequence_group, tensor_group
from finetune.runtime.progress import Cadence, NeverDue
from finetune.runtime.run_folder import SAMPLES_FOLDER
from finetune.runtime.supervision.signals import ReceivedSignals, SpotNotice
from finetune.task.generation import GenerationEvaluator, Metric
from finetune.task.protocol import Task
from finetune.train.evaluate import AveragedWeights, Evaluator, average_formula
from finetune.train.layer_outputs import RECORDED_STEPS, RecordedTask
from finetune.train.meters import Meters
from finetune.train.step import Evaluation, TrainingComponents
from finetune.train.stopping import (
    FAILED_SAVE,
    SPOT_NOTICE,
    STOP_FILE,
    TIME_LIMIT,
    EarlyStopping,
    StopFile,
    StopSources,
)
from finetune.train.update import Update, UpdateInBackward


def make_components(
    restored: RestoredRun,
    *,
    reporter: CallbackReporter,
    startup: StartupTimer,
    signals: ReceivedSignals,
    gpu: DeviceColumns,
    on_path: Callable[[str], None] = no_op,
) -> TrainingComponents:
    """Return the loop's components; the first step reports the duration of the start. Collective."""
    config, built = restored.context.config, restored.built
    _require_same_on_all_ranks(config, built)
    save = _make_saver(restored, reporter=reporter, on_path=on_path)
    training_data, prepared, plan = built.training_data, built.prepared, built.plan
    stops: dict[str, Callable[[], bool]] = {FAILED_SAVE: lambda: save.has_failed}  # of this rank
    if config.train.time_limit_minutes:
        ends_at = startup.started_at + config.train.time_limit_minutes * 60
        stops[TIME_LIMIT] = lambda: time.monotonic() >= ends_at
    if distributed.is_main():
        stops[STOP_FILE] = StopFile(restored.context.stop_file)
    if config.run.spot_notice and os.environ.get("LOCAL_RANK", "0") == "0":  # one process of a machine
        stops[SPOT_NOTICE] = notice = SpotNotice(config.run.spot_notice, log=restored.context.log)
        notice.start()
    if config.train.optimizer.in_backward:
        update: Update = UpdateInBackward(prepared.accelerator, prepared.model, prepared.optimizer)
    else:
        limit = config.train.max_gradient_norm
        update = Update(prepared.accelerator, prepared.model, prepared.optimizer, max_gradient_norm=limit)
    return TrainingComponents(
        accelerator=prepared.accelerator,
        model=prepared.model,
        optimizer=prepared.optimizer,
        task=built.step_task,
        groups=partial(_step_groups, config, built, startup=startup, report=reporter),
        plan=plan,
        sample_verifier=SampleVerifier(training_data.training, plan.global_batch_size),
        row_location=training_data.training.samples.location,
        seed=config.run.seed,
        update=update,
        nonfinite=config.train.nonfinite,
        scales_loss=config.train.precision == "fp16",
        meters=Meters(built.step_task.step_metrics, device=gpu),
        reporter=reporter,
        evaluate=make_evaluation(config, built, reporter=reporter),
        save=save,
        log_due=Cadence(config.report.log_every_steps, plan.num_steps),
        evaluate_due=Cadence(config.evaluate.every_steps, plan.num_steps) if config.evaluate else NeverDue(),
        save_due=Cadence(config.checkpoint.every_steps, plan.num_steps),
        stop_sources=StopSources(signals, stops, requests=reporter.take_requests),
        stop_after_steps=config.train.stop_after_steps,
        early_stopping=EarlyStopping(config.train.early_stopping),
        before_batch=prepared.before_batch,
        reduces_every_microbatch=prepared.reduces_every_microbatch,
        counts_ahead=not _has_ghost_norms(prepared.model),
    )


def _make_saver(restored: RestoredRun, *, reporter: Reporter, on_path: Callable[[str], None]) -> Saver:
    """Return what saves the run; it reports each checkpoint and calls `on_path` with its path."""

    def on_saved(saved: SavedCheckpoint) -> None:
        path = str(saved.path)
        reporter(CheckpointSaved(saved.step, path, saved.size_bytes, saved.seconds, saved.stall_seconds))
        on_path(path)

    return Saver(
        restored.context.checkpoints,
        section=restored.context.config.checkpoint,
        access=restored.access,
        run=restored.fingerprint,
        on_saved=on_saved,
        warn=lambda step, message: reporter(Warned(step, message)),
        before_save=partial(sync_batch_norm, restored.built.prepared.model),
    )


def _step_groups(
    config: RunConfig, built: BuiltRun, *, startup: StartupTimer, report: Reporter, first_step: int
) -> Iterator[tuple[Batch, ...]]:
    """Return this rank's microbatches, a group per step; the end of the first step ends the start of the run."""
    startup.end("run folder")
    training_data, prepared, plan = built.training_data, built.prepared, built.plan
    loader = train_loader(
        training_data.training,
        training_data.task.collate,
        global_batch_size=plan.global_batch_size,
        microbatch_size=plan.microbatch_size,
        first_step=first_step,
        num_steps=plan.num_steps,
        section=config.data,
        seed=config.run.seed,
        cost=training_data.task.samples.loading_cost,
        has_partners=training_data.task.samples.has_partners,
    )
    has_ghost_norms = _has_ghost_norms(prepared.model)

    def end_step(step: int) -> None:
        if step == first_step + 1:
            startup.end("first step")
            report(
                StartedUp(
                    step=step,
                    seconds={phase.name: phase.seconds for phase in startup.phases},
                    cpu_seconds={phase.name: phase.cpu_seconds for phase in startup.phases},
                    memory_bytes={phase.name: phase.memory_bytes for phase in startup.phases},
                )
            )
        if step == first_step + 2 and prepared.memory is not None:
            # It is the first with activations and optimizer state at the same time.
            report(Noted(step, prepared.memory(plan).peak_line))
        if step == first_step + RECORDED_STEPS and isinstance(built.step_task, RecordedTask):
            built.step_task.stop()
        if has_ghost_norms:
            update_running_statistics(prepared.model)

    run_folder = Path(config.run.folder)
    on_group = open_sample_record(run_folder, first_step=first_step).add if config.report.sample_ids else no_op
    groups = StepLoader(
        own_batches(prepared.accelerator, loader),
        plan.num_batches,
        prepared.accelerator.device,
        sequence=sequence_group(),
        are_copies=tensor_group().index > 0,
        first_step=first_step,
        on_group=on_group,
        on_step_end=end_step,
    )
    return iter(groups)


def _has_ghost_norms(model: nn.Module) -> bool:
    """Return whether a recomputed forward pass would count again in a norm's statistics."""
    return any(isinstance(module, GhostBatchNorm) for module in model.modules())


_MAX_STEPS_COMPARED = 1_000


def _require_same_on_all_ranks(config: RunConfig, built: BuiltRun) -> None:
    """Raise RegistryError if plugins give ranks different rows, optimizers or learning rates.

    A schedule is asked for its rates here, so that an invalid one is refused before the first step. Collective for a
    job with plugins.
    """
    names = [entry.name for _, entry in used_entries(config)]
    if not names:
        return
    schedule, num_steps = built.plan.schedule, built.plan.num_steps
    compared = [*range(0, num_steps, -(-num_steps // _MAX_STEPS_COMPARED)), num_steps - 1]
    settings = [_settings(group) for group in built.prepared.optimizer.param_groups]
    facts = {
        "rows": [built.training_data.training.fingerprint, num_steps],
        "the settings of the optimizer": settings,
        "learning rates": [schedule.learning_rate(step) for step in compared],
    }
    for rank, of_rank in enumerate(of_ranks := distributed.gather_objects(facts)):
        for title, value in of_rank.items():
            if value != of_ranks[0][title]:
                raise RegistryError(
                    f"{title} on rank {rank} differ from rank 0's. A plugin must return the same on every rank: one "
                    f"of {', '.join(dict.fromkeys(names))} reads the rank, the time, the host or unseeded randomness."
                )


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a parameter group that are no tensors."""
    return {name: value for name, value in group.items() if isinstance(value, str | int | float | tuple | None)}


def make_evaluation(config: RunConfig, built: BuiltRun, *, reporter: Reporter) -> Evaluation:
    """Return what measures the run on its validation rows, with the weights that it would export."""
    training_data, prepared = built.training_data, built.prepared
    if config.evaluate is None or training_data.validation_set is None:
        return lambda step: {}  # never due
    evaluator = make_evaluator(
        config,
        training_data.task,
        rows=training_data.validation_set,
        model=prepared.model,
        accelerator=prepared.accelerator,
        tokenizer=training_data.tokenizer,
        answer_metrics=training_data.answer_metrics,
        reporter=reporter,
    )
    weights_swapped_in = make_weights(config.train, prepared)

    def evaluate(step: int) -> dict[str, float]:
        sync_batch_norm(prepared.model)
        with weights_swapped_in():
            return evaluator(step)

    return evaluate


def make_weights(train: TrainSection, prepared: PreparedModel) -> Callable[[], AbstractContextManager[None]]:
    """Return a function whose context swaps in the weights to evaluate and export. Collective."""
    average = average_formula(train)
    if average is None:
        return nullcontext
    key, formula = average
    access = build_access(prepared.accelerator, prepared.model, prepared.optimizer)
    return AveragedWeights(access, key, formula).swapped_in


def make_evaluator(
    config: RunConfig,
    task: Task,
    *,
    rows: Any,
    model: Any,
    accelerator: Accelerator,
    tokenizer: Any,
    answer_metrics: Mapping[str, Metric],
    reporter: Reporter,
) -> Evaluator:
    """Return what measures the prepared model on all rows, and on its answers where `evaluate.generate` is written."""
    section = config.evaluate or EvaluateSection()
    sequence, tensor = sequence_group(), tensor_group()
    require_sliceable_model(config, size=sequence.size)
    loader = evaluation_loader(
        rows,
        task.collate,
        dummy_batch=task.dummy_batch,
        microbatch_size=section.microbatch_size or config.train.known_microbatch_size,
        world=sequence.num_groups // tensor.size,
        section=config.data,
        cost=task.samples.loading_cost,
    )
    answers = None
    if section.generate is not None:
        prompts = (task.prompt(rows.intact(i)) for i in range(len(rows)))
        answers = GenerationEvaluator(
            section=section.generate,
            prompts=list(islice((prompt for prompt in prompts if prompt is not None), section.generate.num_samples)),
            tokenizer=tokenizer,
            stop_ids=stop_ids(tokenizer),
            device=accelerator.device,
            metrics=dict(answer_metrics),
        )
    return Evaluator(
        task=task,
        model=model,
        batches=StepLoader(
            own_batches(accelerator, loader), 1, accelerator.device, sequence=sequence, are_copies=tensor.index > 0
        ),
        rows=rows,
        reporter=reporter,
        answers=answers,
    )


_MAX_UNWRITTEN_BYTES = 64 << 20


class SampleRecord:
    """Writes the sample ids of each group to this rank's file in `samples/`.

    A line is `{"step": 1, "microbatches": [[7, 2], [5, 0]]}`, steps counted from 1.
    """

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._unwritten = b""
        weakref.finalize(self, file.close)

    def add(self, step: int, group: Sequence[Batch]) -> None:
        """Write the line of the step; on a full disk it is written with a later one, when there is space again."""
        line = json.dumps({"step": step, "microbatches": [batch.counted_ids for batch in group]}) + "\n"
        self._unwritten += line.encode()
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if error.errno not in FULL or len(self._unwritten) > _MAX_UNWRITTEN_BYTES:
                raise


def open_sample_record(run_folder: Path, *, first_step: int) -> SampleRecord:
    """Return the record, without the lines of steps that are taken again: every step is once in each file.

    Each rank repairs its own files, so none has to wait: a damaged line goes, too, and a file that cannot be read is
    put aside, as the record informs and stops no run.
    """
    folder = run_folder / SAMPLES_FOLDER
    for path in folder.glob("rank-*.jsonl"):
        number = path.stem.removeprefix("rank-")
        if not number.isdecimal() or int(number) % distributed.world() != distributed.rank():
            continue
        try:
            kept = [json.dumps(line) + "\n" for line in _lines(path) if line["step"] <= first_step]
        except OSError:
            path.replace(path.with_name(f".bad-{path.name}"))
        else:
            atomic.write_text(path, "".join(kept))
    folder.mkdir(parents=True, exist_ok=True)
    return SampleRecord((folder / f"rank-{distributed.rank():05d}.jsonl").open("ab", buffering=0))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of the record that have a step; raises OSError where the file cannot be read."""
    for line in atomic.read_json_lines(path):
        if isinstance(line, dict) and type(line.get("step")) is int and type(line.get("microbatches")) is list:
            yield line
