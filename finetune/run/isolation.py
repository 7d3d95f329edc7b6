"""Before the first step of a run whose samples share rows: the proof that its model keeps them apart."""

import inspect
from collections.abc import Sequence
from functools import partial

import numpy as np
from torch import Tensor, nn

from finetune.config.run_config import RunConfig
from finetune.data.features import Features
from finetune.model.isolation import prove_isolation, require_positions
from finetune.run.lessons import Lessons
from finetune.run.machine import Machine
from finetune.task.collate import is_end_to_end
from finetune.task.forward import innermost, logits_of
from finetune.task.protocol import Task


def require_isolation(config: RunConfig, lessons: Lessons, machine: Machine) -> None:
    """Raise ModelError where samples would share rows and the model does not keep them apart. Collective."""
    if not is_end_to_end(config.data.batching):
        return
    model = machine.model
    inner = innermost(machine.plain_model)
    require_positions(frozenset(inspect.signature(inner.forward).parameters), config=inner.config)
    was_training = model.training
    model.eval()
    prove_isolation(
        partial(_logits, model, lessons.task, machine),
        config=inner.config,
        vocabulary_size=len(lessons.tokenizer),
        is_half=config.train.precision != "fp32" or config.model.dtype != "float32",
    )
    model.train(was_training)


def _logits(model: nn.Module, task: Task, machine: Machine, row: Sequence[Sequence[int]]) -> Tensor:
    """Return the logits of the samples as the task lays them out, [tokens, vocabulary]."""
    samples = [Features({"input_ids": np.array(ids, np.uint32), "is_target": np.ones(len(ids), bool)}) for ids in row]
    batch = task.collate(samples).to(machine.accelerator.device)
    return logits_of(model, batch)[0]
