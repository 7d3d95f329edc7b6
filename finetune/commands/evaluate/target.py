"""The model to evaluate: a checkpoint, a `final/` or any model folder, with the job that says how."""

from collections.abc import Sequence
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
from finetune.config.load import RESOLVED_NAME, LoadedConfig, load_resolved
from finetune.config.run_config import RunConfig
from finetune.data.templates.chat_template import set_chat_template
from finetune.data.templates.rendering import use_arguments
from finetune.errors import UserError
from finetune.model.build import build_model
from finetune.model.loading.architecture import NEW_HEADS
from finetune.model.loading.saved import SavedModel, inspect_model_folder, load_saved_model
from finetune.run.setup.model import parameters_in
from finetune.run.setup.padding_free import resolve_padding_free
from finetune.run.state.run_folder import RunInputs, load_run_inputs
from finetune.runtime.parameters import InitContext
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

    def load_weights(self, model: Any) -> None:
        """Give the model the weights of the checkpoint; those of a folder are in it already."""
        if self.saved is not None:
            return
        checkpoint = open_checkpoint(self.source)
        weights = exported_weights(model, checkpoint, train=self.origin.train, trained_only=False)
        with torch.no_grad():
            for name, tensor in {**named_parameters(model), **named_buffers(model)}.items():
                if weights[name] is not tensor:
                    tensor.copy_(weights[name])


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
        return _of_checkpoint(source, step=step, job=job, overrides=overrides, trusts=trusts)
    if step is not None:
        raise UserError(f"--step {step}: {source} has no checkpoints. Name a run's folder, or leave --step out.")
    return _of_folder(source, job=job, overrides=overrides, trusts=trusts)


def _of_checkpoint(
    source: Path, *, step: int | None, job: LoadedConfig | None, overrides: Sequence[str], trusts: bool
) -> EvaluationTarget:
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
    _use_arguments(kept, loaded)
    return EvaluationTarget(loaded, kept, chosen, None, own.config, step_of)


def _use_arguments(run_inputs: RunInputs, loaded: LoadedConfig) -> None:
    """Have conversations rendered with the arguments of the job, where it has some."""
    tokenizer = run_inputs.processing.tokenizer
    if tokenizer is not None:
        use_arguments(tokenizer, loaded.config.data.chat_template_arguments, loaded.sources)


def _of_folder(source: Path, *, job: LoadedConfig | None, overrides: Sequence[str], trusts: bool) -> EvaluationTarget:
    saved = inspect_model_folder(source, key="evaluate", trust_remote_code=trusts)
    run = saved.folder.parent if (saved.folder.parent / RESOLVED_NAME).is_file() else None
    if job is not None:
        loaded = job
    elif run is not None:
        loaded = load_resolved(run, overrides)
        require_trusted_metrics(load_resolved(run), loaded, trust_remote_code=trusts)
    else:
        raise UserError(
            f"{saved.folder}: does not belong to a run, so there is no job to evaluate with. Add --config JOB.yaml."
        )
    loaded = with_trust(loaded, trust_remote_code=trusts)
    if run is not None and job is None:
        kept = load_run_inputs(run, loaded.config)
    else:
        kept = RunInputs(processing_in(saved, trust_remote_code=trusts), {})
        loaded = _with_labels(loaded, saved)
        if kept.processing.tokenizer is not None:
            set_chat_template(kept.processing.tokenizer, loaded.config.data.chat_template)
    _use_arguments(kept, loaded)
    target = EvaluationTarget(loaded, kept, saved.folder, saved, loaded.config)
    head = target.task().head
    return replace(target, saved=replace(saved, head=head))


def _with_labels(loaded: LoadedConfig, saved: SavedModel) -> LoadedConfig:
    """Return the job with the classes that the model itself names, where it has some and the job names none."""
    task = loaded.config.task
    if saved.head not in NEW_HEADS or task.classification.labels:
        return loaded
    classification = task.classification.model_copy(update={"labels": saved.labels})
    named = task.model_copy(update={"classification": classification})
    return replace(loaded, config=loaded.config.model_copy(update={"task": named}))
