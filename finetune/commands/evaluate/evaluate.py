"""`finetune evaluate`: measure a model on the job's validation samples, as a run evaluates itself."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from finetune.commands.evaluate.target import EvaluationTarget, find_evaluation_target
from finetune.config.load import LoadedConfig
from finetune.config.run_config import RunConfig
from finetune.config.sections.train import TrainSection
from finetune.data.encoding.tokenizer import unknown_ids
from finetune.data.sources.source import Source, open_source, open_sources
from finetune.data.token_cache.cache import prepare_set, repair
from finetune.data.token_cache.store import PreparedSet
from finetune.errors import UserError
from finetune.report.reporter import NullReporter
from finetune.report.run_log import RunLog
from finetune.run.build.data import input_identity
from finetune.run.build.evaluator import make_evaluator
from finetune.run.build.precompute import precompute_set
from finetune.run.build.prepared_model import PreparedModel, make_accelerator
from finetune.run.build.teacher import attach_teacher
from finetune.run.train import launched_strategy
from finetune.runtime import distributed
from finetune.runtime.files import atomic
from finetune.runtime.text.library_output import quiet_libraries
from finetune.task.generation.evaluation import load_metrics
from finetune.task.protocol import Task


def evaluate(
    source: Path,
    *,
    step: int | None,
    config: Path | None,
    overrides: Sequence[str],
    json: Path | None,
    trust_remote_code: bool = False,
) -> int:
    """Measure, print the metrics and write them to the file, if one is named; return the exit code.

    Collective over all launched processes, of which each holds the whole model.
    """
    quiet_libraries(is_main=distributed.is_main())
    trusts = trust_remote_code
    subject = find_evaluation_target(source, step=step, config=config, overrides=overrides, trust_remote_code=trusts)
    measured = measure(subject)
    if distributed.is_main():
        told = {"source": str(measured.subject.source), "step": measured.subject.step, "rows": measured.num_rows}
        if json is not None:
            atomic.write_json(json, {**told, "metrics": measured.metrics})
        _print(measured)
    return distributed.shut_down(0)


@dataclass(frozen=True)
class Measurement:
    """What has come out, the same on every rank."""

    subject: EvaluationTarget
    metrics: dict[str, float]
    num_rows: int


def measure(target: EvaluationTarget) -> Measurement:
    """Return the metrics on the job's validation rows, exact on any number of processes. Collective.

    Raises UserError where the job has no validation rows.
    """
    log = RunLog(is_main=distributed.is_main())
    config, task = target.config, target.task()
    rows = _validation(target, task, log=log)
    repair(rows, seconds=None)
    model = target.start(task)  # whole in every process: before an Accelerator exists that would have it split
    accelerator = make_accelerator(config, launched_strategy(_evaluation_job(target.loaded)))
    model.to(accelerator.device)
    machine = PreparedModel(accelerator, model, model, None)
    known = precompute_set(config, task, rows, key="data.validation", prepared=machine, log=log)
    task = attach_teacher(config, task, accelerator, log=log)
    target.fill(model)
    generate = config.evaluate.generate if config.evaluate else None
    evaluator = make_evaluator(
        config,
        task,
        rows=known,
        model=accelerator.prepare_model(model, evaluation_mode=True),
        accelerator=accelerator,
        tokenizer=target.kept.processing.tokenizer,
        answer_metrics=load_metrics(generate.metrics if generate else ()),
        reporter=NullReporter(),
    )
    return Measurement(target, evaluator(target.step), len(rows))


def _validation(subject: EvaluationTarget, task: Task, *, log: RunLog) -> PreparedSet:
    """Return the validation rows, prepared; training rows are read only where these are a part of them."""
    config, processing = subject.config, subject.kept.processing
    tokenizer = processing.tokenizer
    return prepare_set(
        _source(config, log=log),
        encode=task.samples.encode,
        section=config.data,
        identity=input_identity(processing, task),
        unknown_ids=unknown_ids(tokenizer) if tokenizer is not None else frozenset(),
        length=task.samples.length_limit,
        log=log,
    )


def _source(config: RunConfig, *, log: RunLog) -> Source:
    section = config.data.validation
    if section is None:
        raise UserError(
            "the job has no `data.validation`, so there is nothing to measure on. Write "
            "`--set 'data.validation={path: ROWS.jsonl}'`."
        )
    if section.path is not None or section.name is not None:
        return open_source(section, key="data.validation", log=log)
    found = open_sources(config.data, seed=config.run.seed, log=log).validation
    assert found is not None, "a section without a place of its own is a part of the training rows"
    return found


def _evaluation_job(loaded: LoadedConfig) -> LoadedConfig:
    """Return the job without what only training is particular about: its strategy, its batch and its optimizer."""
    config = loaded.config
    bare = {"global_batch_size": config.train.microbatch_size * distributed.world(), "unfreeze": {}, "average": None}
    known = {name: value for name, value in bare.items() if name in TrainSection.model_fields}
    run = config.run.model_copy(update={"strategy": None})
    train = config.train.model_copy(update=known)
    return replace(loaded, config=config.model_copy(update={"run": run, "train": train}))


def _print(measured: Measurement) -> None:
    print(f"{measured.subject.source}: {measured.num_rows:,} rows")
    width = max(map(len, measured.metrics), default=0)
    for name, value in measured.metrics.items():
        print(f"  {name:<{width}}  {value:.6g}")
