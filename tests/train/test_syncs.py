"""Nobody waits for the device within a step: what would make a host wait is counted as torch dispatches it."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.config.sections.data import BatchingSection, DataSection, TrainingSourceSection
from finetune.config.sections.task import TaskSection
from finetune.config.sections.train import NonFiniteSection, OptimizerSection, ScheduleSection, TrainSection
from finetune.data.batch import Batch
from finetune.data.features import Features
from finetune.model.attention.implementation import register_per_sample
from finetune.runtime.progress import Progress
from finetune.runtime.supervision.signals import ReceivedSignals
from finetune.task.causal_lm import CausalTask
from finetune.task.protocol import TaskContext
from finetune.train import update
from finetune.train.meters import Meters
from finetune.train.optim.optimizers import build_optimizer
from finetune.train.optim.parameter_groups import list_parameters
from finetune.train.parts import Parts
from finetune.train.plan import make_plan
from finetune.train.step import StepCounts, take_step
from finetune.train.stopping import StopRequest, StopSources

WAITING = {
    "aten::_local_scalar_dense",  # item, bool, int and float of a tensor
    "aten::is_nonzero",
    "aten::nonzero",  # indexing by a mask, too
    "aten::masked_select",
    "aten::equal",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::repeat_interleave.Tensor",
}
LENGTHS = (5, 3, 7, 4)


class Waits(TorchDispatchMode):
    """Counts the operations that a host would wait for, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.num_seen = 0

    def __torch_dispatch__(self, operation: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        name = operation.name()
        self.num_seen += 1
        is_mask = name == "aten::index.Tensor" and any(
            each is not None and each.dtype == torch.bool for each in given[1]
        )
        if name in WAITING or is_mask:
            self.found[name] += 1
        return operation(*given, **(named or {}))


def llama(attention: str) -> LlamaForCausalLM:
    register_per_sample()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation=attention)


def group_of(task: Any, *, num_batches: int) -> tuple[Batch, ...]:
    chance = np.random.default_rng(0)
    rows = [
        Features(
            {"input_ids": chance.integers(1, 64, length).astype(np.uint32), "is_target": np.ones(length, bool)},
            sample_id=number,
        )
        for number, length in enumerate(LENGTHS)
    ]
    size = len(rows) // num_batches
    return tuple(task.collate(rows[start : start + size]) for start in range(0, len(rows), size))


def second_step(
    accelerator: Accelerator,
    *,
    is_free: bool = True,
    lora: bool = False,
    num_batches: int = 1,
    limit: float | None = 1.0,
    name: str = "adamw",
) -> Callable[[], object]:
    """Return what takes a step once the first, which makes the optimizer's state, has been taken."""
    batching = BatchingSection(padding_free=is_free)
    data = DataSection(train=TrainingSourceSection(path="rows.jsonl"), batching=batching)
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1)
    task = CausalTask(TaskContext(TaskSection(name="pretrain"), data, tokenizer))
    model: Any = llama("per_sample" if is_free else "sdpa")
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    optimizer = build_optimizer(list_parameters(model), OptimizerSection(name=name), learning_rate=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    group = tuple(batch.to(accelerator.device) for batch in group_of(task, num_batches=num_batches))
    parts = parts_of(accelerator, model, optimizer, task=task, limit=limit, num_batches=num_batches)
    counts = StepCounts(sum(each.num_targets for each in group), 19, 0, StopRequest(None, saves=False), has_news=False)
    take = partial(take_step, parts, group, counts, progress=Progress(), started=0.0, data_seconds=0.0)
    take()
    return take


def waits_of_a_step(**how: Any) -> Counter[str]:
    take = second_step(Accelerator(cpu=True), **how)
    with Waits() as waits:
        take()
    assert waits.num_seen > 100
    return waits.found


def parts_of(
    accelerator: Any, model: Any, optimizer: Any, *, task: Any, limit: float | None, num_batches: int
) -> Parts:
    section = TrainSection(
        global_batch_size=len(LENGTHS),
        microbatch_size=len(LENGTHS) // num_batches,
        steps=2,
        learning_rate=0.1,
        schedule=ScheduleSection(name="constant"),
    )
    unused: Any = None
    return Parts(
        accelerator=accelerator,
        model=model,
        optimizer=optimizer,
        task=task,
        groups=unused,
        plan=make_plan(section, num_positions=len(LENGTHS), world=1, steps_for_tokens=lambda tokens: 0),
        deliveries=unused,
        place=str,
        seed=1,
        update=update.Update(accelerator, model, optimizer, max_gradient_norm=limit),
        nonfinite=NonFiniteSection(),
        scales_loss=False,
        meters=Meters(),
        reporter=unused,
        evaluate=unused,
        save=unused,
        log_due=unused,
        evaluate_due=unused,
        save_due=unused,
        stop_sources=StopSources(ReceivedSignals()),
        stop_after_steps=None,
        early_stopping=unused,
    )


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(update, "defers_check_on", lambda device: True)
    monkeypatch.setattr(update, "is_on_host", lambda tensor: False)


@pytest.mark.parametrize("num_batches", [1, 2])
@pytest.mark.parametrize("limit", [1.0, None])
@pytest.mark.parametrize("lora", [False, True])
def test_a_step_over_rows_without_padding_waits_for_nothing(as_on_a_gpu, lora, limit, num_batches):
    assert waits_of_a_step(lora=lora, limit=limit, num_batches=num_batches) == {}


def test_a_step_over_padded_rows_waits_only_where_transformers_looks_into_the_mask(as_on_a_gpu):
    found = waits_of_a_step(is_free=False)
    assert set(found) <= {"aten::_local_scalar_dense"}
    assert found.total() <= MASK_LOOKS


def test_an_optimizer_that_heeds_no_flag_waits_for_its_norm_once(as_on_a_gpu):
    assert waits_of_a_step(name="sgd") == {"aten::_local_scalar_dense": 1}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("lora", [False, True])
def test_cuda_itself_sees_nobody_wait(lora):
    AcceleratorState._reset_state(reset_partial_state=True)
    take = second_step(Accelerator(mixed_precision="bf16"), lora=lora, num_batches=2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        take()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        AcceleratorState._reset_state(reset_partial_state=True)


MASK_LOOKS = 2
"""Times that `masking_utils._ignore_causal_mask_sdpa` reads the padding mask in a forward pass (transformers 5.23)."""
