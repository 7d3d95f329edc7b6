"""A step has no host-device synchronization: CUDA itself raises where a host waits.

Without a GPU the same lines run; there tests/fake_gpu/test_walk.py finds what would wait, in whole runs.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.config.sections.data import BatchingSection, DataSection, TrainingSourceSection
from finetune.config.sections.task import TaskSection
from finetune.config.sections.train import (
    AverageSection,
    NonFiniteSection,
    OptimizerSection,
    ScheduleSection,
    TrainSection,
)
from finetune.data.batch import Batch
from finetune.data.features import Features
from finetune.model.attention.implementation import register_per_sample
from finetune.registry.model_choices import ARITHMETIC
from finetune.runtime.processes import free_loopback_port
from finetune.runtime.progress import Progress
from finetune.runtime.supervision.signals import ReceivedSignals
from finetune.strategy.choose import choose_strategy
from finetune.strategy.environment import read_environment
from finetune.strategy.reconcile import JobSettings
from finetune.task.causal_lm import CausalTask
from finetune.task.protocol import TaskContext
from finetune.train import update
from finetune.train.meters import Meters
from finetune.train.optim.optimizers import build_optimizer
from finetune.train.optim.parameter_groups import list_parameters
from finetune.train.plan import make_step_plan
from finetune.train.step import StepCounts, TrainingComponents, take_step
from finetune.train.stopping import StopRequest, StopSources
from tests.devices import EVERY_DEVICE
from tests.small_models import TINY
from tests.train.deferred_checks import defer_finite_checks

LENGTHS = (5, 3, 7, 4)


def llama() -> LlamaForCausalLM:
    register_per_sample()
    torch.manual_seed(0)
    config = LlamaConfig(**{**TINY, "num_hidden_layers": 2}, vocab_size=64, num_key_value_heads=1)
    return LlamaForCausalLM._from_config(config, attn_implementation="per_sample")


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
    lora: bool = False,
    num_batches: int = 1,
    limit: float | None = 1.0,
    averages: bool = False,
    **section: Any,
) -> Callable[[], object]:
    """Return a function that takes a step, after the first step has created the optimizer's state."""
    data = DataSection(train=TrainingSourceSection(path="rows.jsonl"), batching=BatchingSection(padding_free=True))
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1)
    task = CausalTask(TaskContext(TaskSection(name="pretrain"), data, tokenizer))
    model: Any = llama()
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    settings = OptimizerSection(**section)
    optimizer = build_optimizer(
        list_parameters(model), settings, learning_rate=0.1, average=AverageSection(decay=0.5) if averages else None
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    assert isinstance(model, FSDPModule) == accelerator.is_fsdp2
    group = tuple(batch.to(accelerator.device) for batch in group_of(task, num_batches=num_batches))
    updates = (
        update.UpdateInBackward(accelerator, model, optimizer)
        if settings.in_backward
        else update.Update(accelerator, model, optimizer, max_gradient_norm=limit)
    )
    components = parts_of(accelerator, model, optimizer, task=task, update=updates, num_batches=num_batches)
    counts = StepCounts(sum(each.num_targets for each in group), 19, 0, StopRequest(None, saves=False), has_news=False)
    take = partial(take_step, components, group, counts, progress=Progress(), started=0.0, data_seconds=0.0)
    take()
    return take


LAUNCHED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"},
}
"""What `accelerate launch` sets under accelerate_configs/fsdp2.yaml."""


@contextmanager
def accelerator_of(device: str, kind: str, *, precision: str = "fp32") -> Iterator[Accelerator]:
    """Yield an Accelerator; its process group and launch settings end with the context."""
    has_device = device == "cuda"
    launched = {**LAUNCHED, "MASTER_PORT": str(free_loopback_port())} if kind == "fsdp2" else {}
    if not has_device:
        launched |= {"ACCELERATE_TORCH_DEVICE": "cpu", "DS_ACCELERATOR": "cpu"}
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in launched.items():
            patch.setenv(name, value)
        strategy = choose_strategy(
            read_environment(os.environ, has_device=has_device),
            JobSettings(strategy=None, precision=precision, microbatch_size=1, max_gradient_norm=None),
        )
        try:
            with strategy.accelerator_context(timeout=timedelta(minutes=1)):
                yield Accelerator(mixed_precision=ARITHMETIC[precision].mixed_precision, **strategy.plugin())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            AcceleratorState._reset_state(reset_partial_state=True)


def parts_of(
    accelerator: Any, model: Any, optimizer: Any, *, task: Any, update: Any, num_batches: int
) -> TrainingComponents:
    section = TrainSection(
        global_batch_size=len(LENGTHS),
        microbatch_size=len(LENGTHS) // num_batches,
        steps=2,
        learning_rate=0.1,
        schedule=ScheduleSection(name="constant"),
    )
    unused: Any = None
    return TrainingComponents(
        accelerator=accelerator,
        model=model,
        optimizer=optimizer,
        task=task,
        groups=unused,
        plan=make_step_plan(section, num_positions=len(LENGTHS), world=1, steps_for_tokens=lambda tokens: 0),
        sample_verifier=unused,
        row_location=str,
        seed=1,
        update=update,
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
    defer_finite_checks(monkeypatch)
    monkeypatch.setattr(update, "is_on_host", lambda tensor: False)


ON_DEVICE = {
    "full": {},
    "lora": {"lora": True},
    "no limit": {"limit": None},
    "average": {"averages": True},
    "state in 8 bits": {"state_dtype": "int8"},
    "in backward": {"in_backward": True, "num_batches": 1},
}


@EVERY_DEVICE
@pytest.mark.parametrize("kind", ["single", "fsdp2"])
@pytest.mark.parametrize("name", ON_DEVICE)
def test_cuda_reports_no_synchronization_in_a_step(device, kind, name, request):
    """On a CPU nothing is reported, but every line runs."""
    how = {"num_batches": 2, **ON_DEVICE[name]}
    if kind != "single" and "in_backward" in how:
        pytest.skip("parameters learn in the backward pass of one process only")
    if device == "cpu":
        request.getfixturevalue("as_on_a_gpu")
    with accelerator_of(device, kind, precision="bf16") as accelerator:
        assert accelerator.device.type == device
        take = second_step(accelerator, **how)
        take()  # a fused optimizer, and whatever is made once, has settled
        with nobody_waits(device):
            record = take()
        assert torch.isfinite(record.losses).all()


@contextmanager
def nobody_waits(device: str) -> Iterator[None]:
    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
