"""The record that the loop works with, from config, lessons and machine."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from finetune.config.run_config import RunConfig
from finetune.data.ahead import on_device
from finetune.data.batch import Batch
from finetune.data.delivery import Deliveries
from finetune.data.loader import groups, train_loader
from finetune.report.reporter import Reporter
from finetune.run.evaluator import make_evaluator
from finetune.run.lessons import Lessons
from finetune.run.machine import Machine
from finetune.run.norms import Settled, each_ended
from finetune.run.samples import recorded
from finetune.run.weights import make_weights
from finetune.runtime.cadence import Cadence, Never
from finetune.train.early_stopping import EarlyStopping, NeverStop
from finetune.train.evaluate import NoEvaluation
from finetune.train.in_backward import UpdateInBackward
from finetune.train.meters import Meters
from finetune.train.parts import Evaluation, Parts, Saving
from finetune.train.plan import Plan
from finetune.train.stopping import Wishes
from finetune.train.update import Update
from finetune.train.weights import EvaluationOf


def make_parts(
    config: RunConfig,
    lessons: Lessons,
    *,
    machine: Machine,
    plan: Plan,
    reporter: Reporter,
    save: Saving,
    wishes: Wishes,
) -> Parts:
    """Return the record that the loop works with."""
    stopping = config.train.early_stopping
    return Parts(
        accelerator=machine.accelerator,
        model=machine.model,
        optimizer=machine.optimizer,
        task=lessons.task,
        groups=partial(_groups, config, lessons, machine=machine, plan=plan),
        plan=plan,
        deliveries=Deliveries(lessons.training, plan.global_batch_size),
        place=lessons.training.samples.place,
        seed=config.run.seed,
        update=make_update(config, machine),
        nonfinite=config.train.nonfinite,
        scales_loss=config.train.precision == "fp16",
        meters=Meters(lessons.task.step_metrics),
        reporter=reporter,
        evaluate=_evaluation(config, lessons, machine=machine, reporter=reporter),
        save=save,
        log_due=Cadence(config.report.log_every_steps, plan.num_steps),
        evaluate_due=Cadence(config.evaluate.every_steps, plan.num_steps) if config.evaluate else Never(),
        save_due=Cadence(config.checkpoint.every_steps, plan.num_steps),
        wishes=wishes,
        stop_after_steps=config.train.stop_after_steps,
        early_stopping=EarlyStopping(stopping) if stopping else NeverStop(),
        before_batch=machine.before_batch,
    )


def make_update(config: RunConfig, machine: Machine) -> Update:
    """Return what takes gradients to weights."""
    if config.train.optimizer.in_backward:
        return UpdateInBackward(machine.accelerator, machine.model, machine.optimizer)
    limit = config.train.max_gradient_norm
    return Update(machine.accelerator, machine.model, machine.optimizer, max_gradient_norm=limit)


def _groups(
    config: RunConfig, lessons: Lessons, *, machine: Machine, plan: Plan, first_step: int
) -> Iterator[tuple[Batch, ...]]:
    loader = train_loader(
        lessons.training,
        lessons.task.collate,
        global_batch_size=plan.global_batch_size,
        microbatch_size=plan.microbatch_size,
        first_step=first_step,
        num_steps=plan.num_steps,
        section=config.data,
        seed=config.run.seed,
        cost=lessons.task.loading_cost,
        has_partners=lessons.task.has_partners,
    )
    own = machine.accelerator.prepare_data_loader(loader, device_placement=False)  # this rank's microbatches
    placed = on_device(groups(own, plan.num_batches), machine.accelerator.device)
    handed = each_ended(placed, machine.model)
    if not config.report.sample_ids:
        return handed
    return recorded(handed, run_folder=Path(config.run.folder), first_step=first_step)


def _evaluation(config: RunConfig, lessons: Lessons, *, machine: Machine, reporter: Reporter) -> Evaluation:
    if config.evaluate is None or lessons.validation_set is None:
        return NoEvaluation()
    evaluator = make_evaluator(
        config,
        lessons.task,
        rows=lessons.validation_set,
        model=machine.model,
        accelerator=machine.accelerator,
        tokenizer=lessons.tokenizer,
        answer_metrics=lessons.answer_metrics,
        reporter=reporter,
    )
    return Settled(machine.model, EvaluationOf(make_weights(config, machine), evaluator))
