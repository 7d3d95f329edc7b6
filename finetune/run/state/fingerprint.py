"""The facts that identify a run, as its checkpoints remember them: settings, and digests of data and frozen weights."""

from functools import partial
from typing import Any

from finetune.checkpoint.format.manifest import RunFingerprint
from finetune.config.resume_keys import keys_that_may_differ, keys_that_must_match
from finetune.config.run_config import RunConfig
from finetune.model.frozen_models import base_digest
from finetune.model.loading.pretrained import adapter_digest
from finetune.report.run_log import RunLog
from finetune.run.setup.data import TrainingData, input_identity
from finetune.run.setup.padding_free import recorded_layout
from finetune.run.setup.precompute import teacher_identity
from finetune.runtime import distributed
from finetune.runtime.distributed import run_on_rank_0
from finetune.strategy.protocol import Strategy


def make_fingerprint(
    config: RunConfig, strategy: Strategy, training_data: TrainingData, *, model: Any, log: RunLog
) -> RunFingerprint:
    """Return what checkpoints remember of this run; rank 0 reads the frozen weights for all ranks. Collective.

    `model` is the model as it was built; its config knows the commit that a hub model came from.
    """
    precomputed = training_data.task.precomputed
    is_reference = precomputed is not None and precomputed.scorer == "reference"
    digest = partial(base_digest, config.model, model=model, is_reference=is_reference, log=log)
    base = run_on_rank_0(digest)
    adapter = run_on_rank_0(lambda: adapter_digest(config.model.adapter))
    teacher = teacher_identity(config, log=log)
    return fingerprint_with(config, strategy, training_data, base=base, adapter=adapter, teacher=teacher)


def fingerprint_with(
    config: RunConfig,
    strategy: Strategy,
    training_data: TrainingData,
    *,
    base: str | None,
    adapter: str | None,
    teacher: str | None,
) -> RunFingerprint:
    """Return the same with these digests of frozen weights, first adapter and teacher; None: there is none."""
    digests = {"training data": training_data.training.fingerprint, "tokenizer": _input_digests(training_data)}
    if base is not None:
        digests["base weights"] = base
    if adapter is not None:
        digests["first adapter"] = adapter
    if teacher is not None:
        digests["teacher"] = teacher
    expected = strategy.expected()
    shared = {"rows": expected.sequence_size, "layers": 1 if strategy.name == "tp" else expected.tensor_size}
    return RunFingerprint(
        identity={**keys_that_must_match(config), **digests},
        settings=keys_that_may_differ(config),
        origin={
            "strategy": strategy.name
            + "".join(f" with {name} shared by {size}" for name, size in shared.items() if size > 1),
            "processes": str(distributed.world()),
            **recorded_layout(config),
        },
    )


def _input_digests(training_data: TrainingData) -> str:
    """Return what turns rows into inputs; the chat template is part of it."""
    return ", ".join(
        f"{name} {digest}" for name, digest in input_identity(training_data.processing, training_data.task).items()
    )
