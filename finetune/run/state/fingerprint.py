"""The facts that identify a run, as its checkpoints remember them: settings, and digests of data and frozen weights."""

from functools import partial
from typing import Any

from finetune.checkpoint.format.manifest import RunFingerprint
from finetune.config.resume_keys import keys_that_may_differ, keys_that_must_match
from finetune.config.run_config import RunConfig
from finetune.model.frozen_models import base_digest
from finetune.model.loading.pretrained import adapter_digest
from finetune.report.run_log import RunLog
from finetune.run.build.data import TrainingData, input_identity
from finetune.run.build.teacher import teacher_identity
from finetune.runtime import distributed
from finetune.runtime.distributed import run_on_rank_0


def run_facts(
    config: RunConfig, training_data: TrainingData, *, model: Any, strategy: str, log: RunLog
) -> RunFingerprint:
    """Return what checkpoints remember of this run; rank 0 reads the frozen weights and tells all. Collective.

    `model` is the model as it was built; its config knows the commit that a hub model came from.
    """
    distributed.open_background_group()  # its time limit allows for hundreds of gigabytes; that of a GPU's line does not
    prior = training_data.task.precomputed
    compared = prior is not None and prior.scorer == "reference"
    digest = partial(base_digest, config.model, model=model, is_reference=compared, log=log)
    base = run_on_rank_0(digest, group=distributed.Group.BACKGROUND)
    adapter = run_on_rank_0(lambda: adapter_digest(config.model.adapter), group=distributed.Group.BACKGROUND)
    teacher = teacher_identity(config, log=log)
    return facts_with(base, config, training_data, strategy=strategy, adapter=adapter, teacher=teacher)


def facts_with(
    base: str | None,
    config: RunConfig,
    training_data: TrainingData,
    *,
    strategy: str,
    adapter: str | None,
    teacher: str | None,
) -> RunFingerprint:
    """Return the same with these digests of frozen weights, first adapter and teacher; None: there is no such."""
    digests = {"training data": training_data.training.fingerprint, "tokenizer": _inputs(training_data)}
    if base is not None:
        digests["base weights"] = base
    if adapter is not None:
        digests["first adapter"] = adapter
    if teacher is not None:
        digests["teacher"] = teacher
    return RunFingerprint(
        identity={**keys_that_must_match(config), **digests},
        settings=keys_that_may_differ(config),
        origin={"strategy": strategy, "processes": str(distributed.world())},
    )


def _inputs(training_data: TrainingData) -> str:
    """Return what turns rows into inputs; the chat template matters to whoever talks to the model, too."""
    return ", ".join(
        f"{name} {digest}" for name, digest in input_identity(training_data.processing, training_data.task).items()
    )
