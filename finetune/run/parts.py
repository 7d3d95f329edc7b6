"""The record that the loop works with, from config, lessons and machine."""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from finetune.config.run_config import RunConfig
from finetune.config.sections.evaluate import GenerateSection
from finetune.data.batch import Batch
from finetune.data.encoding.chat import stop_ids
from finetune.data.loader import evaluation_loader, groups, train_loader
from finetune.data.order.consumed import step_mark
from finetune.data.prepared.store import PreparedSet
from finetune.report.reporter import Reporter
from finetune.run.lessons import Lessons
from finetune.run.machine import Machine
from finetune.run.samples import recorded
from finetune.run.weights import make_weights
from finetune.runtime import ranks
from finetune.runtime.cadence import Cadence, Never
from finetune.train.answer import Answers
from finetune.train.evaluate import Evaluator, NoEvaluation
from finetune.train.meters import Meters
from finetune.train.parts import Evaluation, Parts, Saving
from finetune.train.plan import Plan
from finetune.train.stopping import EarlyStopping, NeverStop, Wishes
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
        step_mark=partial(step_mark, lessons.training.order, global_batch_size=plan.global_batch_size),
        place=lessons.training.samples.place,
        seed=config.run.seed,
        max_gradient_norm=config.train.max_gradient_norm,
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
    )
    handed = groups(machine.accelerator.prepare_data_loader(loader), plan.num_batches)
    if not config.report.sample_ids:
        return handed
    return recorded(handed, run_folder=Path(config.run.folder), first_step=first_step)


def _evaluation(config: RunConfig, lessons: Lessons, *, machine: Machine, reporter: Reporter) -> Evaluation:
    section, rows = config.evaluate, lessons.validation_set
    if section is None or rows is None:
        return NoEvaluation()
    loader = evaluation_loader(
        rows,
        lessons.task.collate,
        filler=lessons.task.filler,
        microbatch_size=section.microbatch_size or config.train.microbatch_size,
        world=ranks.world(),
        section=config.data,
    )
    evaluator = Evaluator(
        task=lessons.task,
        model=machine.model,
        loader=machine.accelerator.prepare_data_loader(loader),
        num_rows=len(rows),
        reporter=reporter,
        answers=_answers(section.generate, lessons, rows=rows, machine=machine),
    )
    return EvaluationOf(make_weights(config, machine), evaluator)


def _answers(
    section: GenerateSection | None, lessons: Lessons, *, rows: PreparedSet, machine: Machine
) -> Answers | None:
    if section is None:
        return None
    prompts = (lessons.task.prompt(rows[i]) for i in range(len(rows)))
    return Answers(
        section=section,
        prompts=list(islice((prompt for prompt in prompts if prompt is not None), section.num_samples)),
        tokenizer=lessons.tokenizer,
        stop_ids=stop_ids(lessons.tokenizer),
        device=machine.accelerator.device,
        metrics=lessons.answer_metrics,
    )
