"""The evaluator of a model on the validation rows, and the weights that it uses."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

from accelerate import Accelerator

from finetune.checkpoint.sharding.access import build_access
from finetune.config.run_config import RunConfig
from finetune.config.sections.evaluate import EvaluateSection
from finetune.config.sections.train import TrainSection
from finetune.data.loader import StepLoader, evaluation_loader
from finetune.data.templates.chat_template import stop_ids
from finetune.model.batch_norm import sync_batch_norm
from finetune.report.reporter import Reporter
from finetune.run.setup.accelerator import PreparedModel
from finetune.run.setup.build import BuiltRun
from finetune.run.setup.strategy import require_sliceable_model
from finetune.runtime.parallel import sequence_group, tensor_group
from finetune.task.generation import GenerationEvaluator, Metric
from finetune.task.protocol import Task
from finetune.train.accelerator import own_batches
from finetune.train.components import Evaluation
from finetune.train.evaluate import AveragedWeights, Evaluator, average_formula


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
    """Return a function whose context swaps in the weights to evaluate and export. Collective.

    They are the average where the optimizer keeps one, else the trained.
    """
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
