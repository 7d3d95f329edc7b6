"""`finetune evaluate`: measure a run, a checkpoint or a model on validation samples, as a run evaluates itself."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from finetune.checkpoint.format import layout
from finetune.checkpoint.read.inventory import locate_run, select_checkpoint
from finetune.checkpoint.read.load import open_checkpoint
from finetune.checkpoint.sharding.state_layout import named_buffers, named_parameters
from finetune.commands.export import exported_weights, is_run, processing_in
from finetune.commands.source import require_trusted_metrics, with_trust
from finetune.config.load import RESOLVED_NAME, LoadedConfig, load_config, load_resolved
from finetune.config.run_config import RunConfig
from finetune.data.sources.source import Source, open_source, open_sources
from finetune.data.templates.chat_template import set_chat_template
from finetune.data.templates.rendering import use_arguments
from finetune.data.token_cache.cache import prepare_set
from finetune.data.token_cache.store import TokenCache
from finetune.errors import UserError
from finetune.model.build import build_model
from finetune.model.loading.architecture import NEW_HEADS
from finetune.model.loading.saved import SavedModel, inspect_model_folder, load_saved_model
from finetune.report.reporter import RunLog
from finetune.run.setup.accelerator import PreparedModel, make_accelerator
from finetune.run.setup.components import make_evaluator
from finetune.run.setup.model_problems import parameters_in, resolve_padding_free
from finetune.run.setup.precompute import attach_teacher, precompute_set
from finetune.run.setup.strategy import launched_strategy
from finetune.run.setup.training_data import make_encoding
from finetune.run.state.run_folder import RunInputs, load_run_inputs
from finetune.runtime import distributed
from finetune.runtime.files import atomic
from finetune.runtime.optional import no_op
from finetune.runtime.parameters import InitContext
from finetune.runtime.resources import disk_errors
from finetune.runtime.text.terminal import quiet_libraries
from finetune.strategy.upstream import unsharded
from finetune.task.generation import resolve_metrics
from finetune.task.protocol import Task


@dataclass(frozen=True)
class EvaluationTarget:
    """A model that has been looked for and not loaded yet, and the job by which it is measured."""

    loaded: LoadedConfig
    run_inputs: RunInputs
    source: Path  # a checkpoint or a model folder
    saved: SavedModel | None  # None: a checkpoint
    origin: RunConfig  # of the run that the checkpoint is from; else as `loaded`
    step: int = 0

    @property
    def config(self) -> RunConfig:
        """Return the job by which it is measured."""
        return self.loaded.config

    def task(self) -> Task:
        """Return the task; raises DataError where the job cannot serve it."""
        saved = self.saved
        data = (
            None
            if saved is None
            else resolve_padding_free(self.config, model=saved.config, adapter=saved.adapter or {})
        )
        return self.run_inputs.task(self.config, data=data)

    def initial_model(self, task: Task) -> Any:
        """Return the model as the run began with it, from which a task's outputs are precomputed; a folder's own."""
        if self.saved is not None:
            section = self.config.model
            trusts = section.trust_remote_code
            return load_saved_model(self.saved, key="evaluate", dtype=section.dtype, trust_remote_code=trusts)
        tokenizer = self.run_inputs.processing.tokenizer
        recorded = parameters_in(self.source)
        return build_model(
            self.origin.model,
            head=task.head,
            head_values=task.head_values,
            tokenizer=tokenizer,
            seed=self.origin.run.seed,
            init_context=InitContext(),
            recorded=recorded,
        )

    def load_weights(self, model: Any) -> Any:
        """Give the model the weights of the checkpoint and return it; a folder's are loaded already."""
        if self.saved is not None:
            return model
        checkpoint = open_checkpoint(self.source)
        weights = exported_weights(model, checkpoint, train=self.origin.train, trained_only=False)
        with torch.no_grad():
            for name, tensor in {**named_parameters(model), **named_buffers(model)}.items():
                if weights[name] is not tensor:
                    tensor.copy_(weights[name])
        return model


def find_evaluation_target(
    source: Path,
    *,
    step: int | None,
    job: LoadedConfig | None,
    overrides: Sequence[str],
    trust_remote_code: bool = False,
) -> EvaluationTarget:
    """Return the model to measure and its job; raises UserError without a model, or without a job for it.

    `overrides` change the run's own job if no other is named. A model's own code runs only if the caller or `job`
    allows it; the run's own record does not count.
    """
    trusts = trust_remote_code or (job is not None and job.config.model.trust_remote_code)
    if is_run(source):
        location = locate_run(source)
        chosen = select_checkpoint(location, step=step)
        own = with_trust(load_resolved(location.run), trust_remote_code=trusts)
        loaded = with_trust(load_resolved(location.run, overrides) if job is None else job, trust_remote_code=trusts)
        if job is None:
            require_trusted_metrics(own, loaded, trust_remote_code=trusts)
        if loaded.config.task.name != own.config.task.name:
            raise UserError(
                f"--config: {loaded.path} has the task `{loaded.config.task.name}`, and the run was trained on "
                f"`{own.config.task.name}`. Name a job of that task, or another run."
            )
        step_of = layout.step_of(chosen) or 0
        kept = load_run_inputs(location.run, own.config)
        _use_template(kept, loaded, own=own)
        return EvaluationTarget(loaded, kept, chosen, None, own.config, step_of)
    if step is not None:
        raise UserError(f"--step {step}: {source} has no checkpoints. Name a run's folder, or leave --step out.")
    return _of_folder(source, job=job, overrides=overrides, trusts=trusts)


def _use_template(run_inputs: RunInputs, loaded: LoadedConfig, *, own: LoadedConfig | None) -> None:
    """Render conversations with the job's template, unless it is that of the run itself, and with its arguments."""
    tokenizer, data = run_inputs.processing.tokenizer, loaded.config.data
    if tokenizer is not None:
        if own is None or data.chat_template != own.config.data.chat_template:
            set_chat_template(tokenizer, data.chat_template)
        use_arguments(tokenizer, data.chat_template_arguments, loaded.sources)


def _of_folder(source: Path, *, job: LoadedConfig | None, overrides: Sequence[str], trusts: bool) -> EvaluationTarget:
    saved = inspect_model_folder(source, key="evaluate", trust_remote_code=trusts)
    run = saved.folder.parent if (saved.folder.parent / RESOLVED_NAME).is_file() else None
    own = None if job is not None or run is None else load_resolved(run)
    if job is not None:
        loaded = job
    elif run is not None and own is not None:
        loaded = load_resolved(run, overrides)
        require_trusted_metrics(own, loaded, trust_remote_code=trusts)
    else:
        raise UserError(
            f"{saved.folder}: does not belong to a run, so there is no job to evaluate with. Add --config JOB.yaml."
        )
    loaded = with_trust(loaded, trust_remote_code=trusts)
    if run is not None and job is None:
        kept = load_run_inputs(run, loaded.config)
    else:
        kept = RunInputs(processing_in(saved, trust_remote_code=trusts), {})
        task = loaded.config.task
        if saved.head in NEW_HEADS and not task.classification.labels:  # the model itself may name its classes
            classification = task.classification.model_copy(update={"labels": saved.labels})
            task = task.model_copy(update={"classification": classification})
            loaded = replace(loaded, config=loaded.config.model_copy(update={"task": task}))
    _use_template(kept, loaded, own=own)
    target = EvaluationTarget(loaded, kept, saved.folder, saved, loaded.config)
    head = target.task().head
    return replace(target, saved=replace(saved, head=head))


def evaluate(
    source: Path,
    *,
    step: int | None,
    config: Path | None,
    overrides: Sequence[str],
    json: Path | None,
    trust_remote_code: bool = False,
) -> int:
    """Evaluate, print the metrics, write them to the JSON file if one is named, and return the exit code.

    Collective over all launched processes; each of them holds the whole model.
    """
    quiet_libraries(is_main=distributed.is_main())
    require_result_file(json)
    job, trusts = None if config is None else load_config(config, overrides), trust_remote_code
    target = find_evaluation_target(source, step=step, job=job, overrides=overrides, trust_remote_code=trusts)
    measured = measure_metrics(target)

    def report() -> Mapping[str, Any]:
        print(f"{target.source}: {measured.num_rows:,} rows")
        width = max(map(len, measured.metrics), default=0)
        for name, value in measured.metrics.items():
            print(f"  {name:<{width}}  {value:.6g}")
        about = {"source": str(target.source), "step": target.step, "rows": measured.num_rows}
        return {**about, "metrics": measured.metrics}

    report_on_rank_0(report, json=json)
    return distributed.shut_down(0)


def require_result_file(json: Path | None) -> None:
    """Raise OSError on rank 0 if there is to be a file, and it cannot be written."""
    if json is not None and distributed.is_main():
        atomic.require_writable(json)


def report_on_rank_0(report: Callable[[], Mapping[str, Any]], *, json: Path | None) -> None:
    """Call `report` on rank 0, which prints, and write what it returns to the file if there is to be one. Collective.

    Raises UserError on all ranks if that fails.
    """

    def write() -> None:
        result = report()
        if json is not None:
            with disk_errors([json.parent], UserError):
                atomic.write_json(json, result)

    distributed.run_on_rank_0(write)


def evaluate_model(
    source: Path, *, step: int | None, job: LoadedConfig | None, overrides: Sequence[str], trust_remote_code: bool
) -> dict[str, float]:
    """Return the metrics on every rank, and print nothing. Collective over all launched processes."""
    quiet_libraries(is_main=distributed.is_main())
    trusts = trust_remote_code
    target = find_evaluation_target(source, step=step, job=job, overrides=overrides, trust_remote_code=trusts)
    metrics = measure_metrics(target).metrics
    distributed.wait_for_devices()
    return metrics


@dataclass(frozen=True)
class Measurement:
    """The metrics of an evaluation, the same on every rank."""

    metrics: dict[str, float]
    num_rows: int


@dataclass(frozen=True)
class EvaluationSetup:
    """The validation rows of a job, and the device on which models are measured on them."""

    config: RunConfig
    task: Task
    source: Source
    rows: TokenCache
    accelerator: Any
    log: RunLog

    def load_initial(self, target: EvaluationTarget) -> Any:
        """Return the target's model on the device, as its run began with it; a folder's own. Collective."""
        with unsharded(self.accelerator):
            model = target.initial_model(self.task)
        return model.to(self.accelerator.device)

    def with_frozen_outputs(self, model: Any) -> "EvaluationSetup":
        """Return the setup with everything that its task needs of the initial model or of a teacher. Collective."""
        config, accelerator, log = self.config, self.accelerator, self.log
        prepared = PreparedModel(accelerator, model, model, None)
        rows = precompute_set(config, self.task, self.rows, key="data.validation", prepared=prepared, log=log)
        return replace(self, rows=rows, task=attach_teacher(config.model, self.task, accelerator=accelerator, log=log))


def prepare_evaluation(target: EvaluationTarget) -> EvaluationSetup:
    """Return the job's validation rows, encoded, and the device; raises UserError where it has none. Collective."""
    # Strategy, batch, unfreezing and average of the job matter to training alone.
    job = target.loaded.config
    batch_size = job.train.known_microbatch_size * distributed.world()
    bare = {"global_batch_size": batch_size, "unfreeze": (), "average": None}
    sections = {"run": job.run.model_copy(update={"strategy": None}), "train": job.train.model_copy(update=bare)}
    strategy = launched_strategy(replace(target.loaded, config=job.model_copy(update=sections)))
    log = RunLog(is_main=distributed.is_main())
    config, task = target.config, target.task()
    encoding = make_encoding(config.data, target.run_inputs.processing, task, name=config.task.name)
    source = _source(config, log=log)
    rows = prepare_set(source, encoding, log=log)
    # Before the model: quantized weights are loaded to the device that it chooses.
    return EvaluationSetup(config, task, source, rows, make_accelerator(config, strategy, log=log), log)


def measure_metrics(target: EvaluationTarget) -> Measurement:
    """Return the metrics on the job's validation rows, exact on any number of processes. Collective.

    Raises UserError where the job has no validation rows.
    """
    setup = prepare_evaluation(target)
    model = setup.load_initial(target)
    setup = setup.with_frozen_outputs(model)
    target.load_weights(model)
    config, accelerator = setup.config, setup.accelerator
    generate = config.evaluate.generate if config.evaluate else None
    evaluator = make_evaluator(
        config,
        setup.task,
        rows=setup.rows,
        model=accelerator.prepare_model(model, evaluation_mode=True),
        accelerator=accelerator,
        tokenizer=target.run_inputs.processing.tokenizer,
        answer_metrics=resolve_metrics(generate.metrics if generate else ()),
        reporter=no_op,
    )
    return Measurement(evaluator(target.step), len(setup.rows))


def _source(config: RunConfig, *, log: RunLog) -> Source:
    """Return the validation rows; training rows are read only if they are split off from them."""
    section = config.data.validation
    if section is None:
        raise UserError(
            "data.validation: the job has no validation data to evaluate on. Add "
            "`--set 'data.validation={path: ROWS.jsonl}'`."
        )
    if any(address is not None for address in (section.path, section.name, section.source)):
        return open_source(section, key="data.validation", log=log)
    validation = open_sources(config.data, seed=config.run.seed, log=log).validation
    assert validation is not None, "a section without a source of its own is split off from the training rows"
    return validation
