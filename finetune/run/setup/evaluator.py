"""The evaluator that measures a model on the validation samples, during training and afterwards."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

from accelerate import Accelerator

from finetune.config.run_config import RunConfig
from finetune.config.sections.evaluate import EvaluateSection
from finetune.data.loader import StepGroups, evaluation_loader
from finetune.data.templates.chat_template import stop_ids
from finetune.report.reporter import Reporter
from finetune.run.setup.strategy import require_sliceable_model
from finetune.runtime.parallel.sequence import sequence_group
from finetune.runtime.parallel.tensor import tensor_group
from finetune.task.generation.evaluation import GenerationEvaluator, Metric
from finetune.task.protocol import Task
from finetune.train.accelerator import own_batches
from finetune.train.evaluate import Evaluator


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
    return Evaluator(
        task=task,
        model=model,
        batches=StepGroups(
            own_batches(accelerator, loader), 1, accelerator.device, sequence=sequence, are_copies=tensor.index > 0
        ),
        rows=rows,
        reporter=reporter,
        answers=_answers(section, task, rows, accelerator=accelerator, tokenizer=tokenizer, metrics=answer_metrics),
    )


def _answers(
    section: EvaluateSection,
    task: Task,
    rows: Any,
    *,
    accelerator: Accelerator,
    tokenizer: Any,
    metrics: Mapping[str, Metric],
) -> GenerationEvaluator | None:
    if section.generate is None:
        return None
    prompts = (task.prompt(rows.intact(i)) for i in range(len(rows)))
    return GenerationEvaluator(
        section=section.generate,
        prompts=list(islice((prompt for prompt in prompts if prompt is not None), section.generate.num_samples)),
        tokenizer=tokenizer,
        stop_ids=stop_ids(tokenizer),
        device=accelerator.device,
        metrics=dict(metrics),
    )
