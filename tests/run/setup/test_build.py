"""`model.compile: auto` decides by pretended facts: the GPU, the number of steps, and other keys."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.config.load import load_config
from finetune.model.kernels import fused_layers
from finetune.run.setup import build, patches
from finetune.run.setup.build import free_device_bytes, plan_accumulation
from finetune.run.setup.patches import _chosen_compilation
from finetune.strategy.gradient_sync import GradientReduction

JOB = """
run: {folder: run}
model: {from_config: {model_type: llama}, tokenizer: {train: {vocabulary_size: 300}}, compile: auto, dtype: bfloat16}
data: {train: {path: rows.jsonl, format: text}, max_length: 2048, over_length: drop}
task: {name: pretrain}
train: {global_batch_size: 16, microbatch_size: 2, steps: 10, learning_rate: 1e-4, precision: bf16}
"""
SHAPES = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
TRAINING = SimpleNamespace(
    order=SimpleNamespace(samples=lambda first, last: np.arange(last)),
    samples=SimpleNamespace(lengths_of=lambda samples: np.full(len(samples), 2000)),
)


@pytest.fixture
def decide(tmp_path, monkeypatch):
    """Return a function that decides for a Llama of 7B on eight pretended GPUs: what is compiled, and the line."""
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "rows.jsonl").write_text('{"text": "a row"}\n')
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(patches, "why_not_compilable", lambda: None)
    monkeypatch.setattr(fused_layers, "find_spec", lambda _: None)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPES, vocab_size=320))

    def run(steps=1000, *overrides, gpu="NVIDIA H100 80GB HBM3", strategy="fsdp2", sequence_size=1):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
        config, lines = load_config(tmp_path / "job.yaml", overrides).config, []
        plan = SimpleNamespace(
            num_steps=steps, global_batch_size=16, world=8, num_positions=100, sequence_size=sequence_size
        )
        named = SimpleNamespace(name=strategy)
        return _chosen_compilation(config, model, named, TRAINING, plan, log=lines.append), lines

    return run


def test_a_long_run_compiles_and_a_short_one_does_not(decide):
    """Of 4,000 tokens per rank and step, each of 32 layers saves 223 x 4,096 bytes: 44 ms at 2.68 TB/s."""
    assert decide(1000) == (
        "off",
        ["model.compile: auto: off, since in 1,000 steps compiling takes about 60 s and saves about 44 s"],
    )
    assert decide(10_000) == (
        "regional",
        ["model.compile: auto: regional, since in 10,000 steps compiling takes about 60 s and saves about 436 s"],
    )


def test_slower_memory_and_recomputation_save_more(decide):
    assert decide(2500)[0] == "off"
    assert decide(2500, "model.gradient_checkpointing=true")[0] == "regional"
    assert decide(2500, gpu="NVIDIA L40S")[0] == "regional"


@pytest.mark.parametrize(
    ("facts", "overrides", "reason"),
    [
        ({"strategy": "zero3"}, [], "zero3 breaks the compiled graph"),
        ({"sequence_size": 2}, [], "splitting rows over ranks breaks"),
        ({"gpu": "RTX 4090 Laptop GPU"}, [], "not in the table"),
        ({}, ["model.kernels=liger"], "liger-kernel fuse the same"),
        ({}, ["train.router_aux_loss=0.01"], "train.router_aux_loss"),
    ],
)
def test_nothing_is_compiled_however_long_the_run_is(decide, facts, overrides, reason):
    mode, (line,) = decide(10**6, *overrides, **facts)
    assert mode == "off" and reason in line


def test_nothing_is_compiled_on_a_cpu_or_where_the_compiler_does_not_work(decide, monkeypatch):
    monkeypatch.setattr(patches, "why_not_compilable", lambda: "triton is not installed")
    assert decide(10**6) == ("off", ["model.compile: auto: off, since triton is not installed"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert decide(10**6) == ("off", ["model.compile: auto: off, since this run has no GPU"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_of_this_machine_is_decided_for(decide):
    mode, (line,) = decide(10**9, gpu=torch.cuda.get_device_name())
    assert (mode == "regional") == ("saves about" in line)


GB = 10**9
CPU = torch.device("cpu")


def arguments_of(reduction=GradientReduction.EITHER, **settings):
    log = []
    strategy = SimpleNamespace(reduction=reduction, expected=SimpleNamespace(num_processes=8), name="fsdp2")
    config = SimpleNamespace(
        run=SimpleNamespace(deterministic=settings.get("deterministic", False)),
        train=SimpleNamespace(microbatch_size=1, optimizer=SimpleNamespace(stochastic_rounding=False)),
    )
    return {"config": config, "strategy": strategy, "log": log.append}, log


@pytest.mark.parametrize(("least", "reduces"), [(80, False), (79, True)])
def test_the_rank_with_the_least_memory_decides_for_all(monkeypatch, least, reduces):
    monkeypatch.setattr(build.distributed, "gather_objects", lambda own: [130 * GB, least * GB, 120 * GB])
    arguments, lines = arguments_of()
    accumulation = plan_accumulation(**arguments, device=CPU, num_trained=8 * GB, num_batches=4, planned_bytes=16 * GB)
    assert accumulation.reduces_every_microbatch == reduces
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("reduction", "num_batches"),
    [(GradientReduction.LAST, 4), (GradientReduction.EVERY, 4), (GradientReduction.EITHER, 1)],
)
def test_free_memory_is_not_gathered_if_the_gradient_reduction_is_fixed(monkeypatch, reduction, num_batches):
    monkeypatch.setattr(build.distributed, "gather_objects", None)
    arguments, lines = arguments_of(reduction)
    plan_accumulation(**arguments, device=CPU, num_trained=8 * GB, num_batches=num_batches, planned_bytes=0)
    assert lines == []


def test_ranks_of_a_machine_share_its_memory(monkeypatch):
    monkeypatch.setattr(build, "available_bytes", lambda: 64 * GB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert free_device_bytes(CPU) == 8 * GB
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(mem_get_info=lambda _: (5, 9)))
    assert free_device_bytes(torch.device("cuda")) == 5
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace())
    assert free_device_bytes(torch.device("mps")) == 0


def test_each_step_of_a_build_has_a_reason_and_the_accelerator_comes_last():
    steps = [step.__name__.removeprefix("_") for step, _ in build.BUILD_STEPS]
    assert all(reason for _, reason in build.BUILD_STEPS)
    assert (steps[:2], steps[-1]) == (["measure_process", "load"], "prepare")
    assert (
        steps.index("check") < steps.index("split_layers") < steps.index("plan_memory") < steps.index("make_optimizer")
    )
