"""A step without values takes the memory of the same step with values, and few layers predict that of many."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from finetune.config.load import load_config
from finetune.errors import ModelError
from finetune.memory import predict as predicting
from finetune.memory import trace
from finetune.memory.predict import MemoryPredictor
from finetune.memory.state import TrainingLayout
from finetune.model.kernels import fused_layers
from finetune.registry.optimizers import OPTIMIZERS
from finetune.run.setup.model_problems import resolve_padding_free
from tests.memory.measured_jobs import COMBINATIONS, measure_peak, write_job

SIZES = "hidden_size: 64, intermediate_size: 128, num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 512"
PARAMETERS_OF_A_LAYER = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64


def config_of(tmp_path, *, model="llama", values=f"{SIZES}, num_hidden_layers: 8", overrides=(), task="pretrain"):
    """Return the config of a job; of its data only the greatest length matters."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    path = tmp_path / "job.yaml"
    path.write_text(
        f"""
run: {{folder: run, seed: 7}}
model:
  from_config: {{model_type: {model}, values: {{{values}}}}}
  tokenizer: {{train: {{vocabulary_size: 300}}}}
data: {{train: {{path: rows.jsonl}}, max_length: 128}}
task: {{name: {task}}}
train: {{global_batch_size: 8, microbatch_size: 2, steps: 4, learning_rate: 1e-4}}
checkpoint: {{asynchronous: false}}
"""
    )
    return load_config(path, overrides).config


def predictor_of(config):
    return MemoryPredictor(config, resolve_padding_free(config))


def predict(config, layout):
    return predictor_of(config).predict(layout)


def layout(strategy="single", method="full", *, recomputes=False, ranks=2, microbatch=2, device="cpu"):
    num_ranks = 1 if strategy == "single" else ranks
    return TrainingLayout(strategy, num_ranks, method, recomputes, microbatch, device=device)


@pytest.mark.parametrize(
    ("strategy", "method", "recomputes"),
    [("single", "full", False), ("single", "lora", True), ("fsdp2", "full", True), ("zero3", "lora", False)],
)
def test_two_and_three_layers_predict_the_memory_of_eight(monkeypatch, tmp_path, strategy, method, recomputes):
    asked = layout(strategy, method, recomputes=recomputes)
    few = predict(config_of(tmp_path), asked)
    monkeypatch.setattr(predicting, "MAX_KINDS", 0)
    whole = predict(config_of(tmp_path), asked)
    assert few.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.01)
    assert few.flops_per_token == pytest.approx(whole.flops_per_token)
    assert (few.num_parameters, few.num_trained) == (whole.num_parameters, whole.num_trained)


def test_a_step_without_values_takes_the_memory_of_one_with_values(monkeypatch, tmp_path):
    config = config_of(tmp_path)
    without = predict(config, layout())
    monkeypatch.setattr(trace, "FakeTensorMode", lambda **_: nullcontext())
    monkeypatch.setattr(trace, "unset_fake_temporarily", nullcontext)
    with_values = predict(config, layout())
    assert without.peak_bytes == with_values.peak_bytes
    assert without.flops_per_token == with_values.flops_per_token


def test_parameters_and_flops_can_be_counted_by_hand(tmp_path):
    found = predict(config_of(tmp_path), layout(recomputes=True))
    assert found.num_parameters == 8 * PARAMETERS_OF_A_LAYER + 2 * 512 * 64 + 64
    matrices = 8 * (PARAMETERS_OF_A_LAYER - 2 * 64) + 512 * 64
    attention = 8 * 4 * 128 * 64  # a token's scores and values: 2 x 2 x length x width
    assert found.flops_per_token == pytest.approx(3 * 2 * matrices + 3.5 * attention, rel=0.02)
    recomputed = matrices - 512 * 64 - 8 * 64 * 128  # all but the head, and the last product of each layer
    assert found.recomputed_flops_per_token == pytest.approx(2 * recomputed + attention)
    assert found.attention_flops_per_token == pytest.approx(4.5 * attention, rel=0.01)
    assert found.num_adapted_features == 0


def test_the_inputs_and_outputs_of_adapted_layers_are_counted(tmp_path):
    """Of 64 features: `q_proj` in and out, `down_proj` in (128) and out, in each of 8 layers."""
    lora = "model.lora={rank: 4, target_modules: [q_proj, down_proj]}"
    found = predict(config_of(tmp_path, overrides=[lora]), layout(method="lora"))
    assert found.num_adapted_features == 8 * (64 + 64 + 128 + 64)


def test_frozen_weights_that_are_cast_once_are_counted_in_8_bits_as_well(tmp_path):
    config = config_of(tmp_path, overrides=["model.lora={rank: 4}", "train.precision=fp8"])
    alone, sharded = (predict(config, layout(strategy, "lora")).parts for strategy in ("single", "fsdp2"))
    assert alone["8-bit copies of frozen weights"] == 8 * (PARAMETERS_OF_A_LAYER - 2 * 64)
    assert "8-bit copies of frozen weights" not in sharded


def test_a_strategy_divides_the_parts_that_it_shards(tmp_path):
    predictor = predictor_of(config_of(tmp_path))
    single, ddp, zero3 = (predictor.predict(layout(name, ranks=4)) for name in ("single", "ddp", "zero3"))
    weights = 4 * single.num_parameters
    assert ddp.parts["weights"] == pytest.approx(weights, rel=1e-3)  # and `inv_freq`
    assert ddp.parts["gradients"] == weights  # in its buckets, also where a single process has none yet
    assert zero3.parts["weights"] == pytest.approx(weights / 4, rel=1e-3)
    assert zero3.parts["optimizer"] == pytest.approx(3 * weights / 4)  # float32 weights and two moments
    assert sum(zero3.parts.values()) == zero3.peak_bytes


def test_recomputation_adapters_and_quantized_weights_take_less_memory(tmp_path):
    predictor = predictor_of(config_of(tmp_path, overrides=["train.precision=bf16"]))
    full, recomputed = predictor.predict(layout()), predictor.predict(layout(recomputes=True))
    lora, packed = predictor.predict(layout(method="lora")), predictor.predict(layout(method="qlora"))
    assert recomputed.peak_bytes < full.peak_bytes
    assert lora.parts["optimizer"] < full.parts["optimizer"] / 2
    assert packed.parts["weights"] < lora.parts["weights"] / 2
    assert packed.num_parameters == lora.num_parameters


@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_4bit", "paged_adamw", "paged_adamw_8bit"])
def test_moments_of_packages_are_predicted_where_they_are_not_installed_and_no_gpu_is(tmp_path, name):
    predictor = predictor_of(config_of(tmp_path, overrides=[f"train.optimizer={{name: {name}}}"]))
    found = predictor.predict(layout())
    assert found.parts["optimizer"] == pytest.approx(2 * OPTIMIZERS[name].moment_bytes * found.num_parameters, rel=0.01)
    assert predictor.predict(layout("fsdp2", ranks=4)).parts["optimizer"] < found.parts["optimizer"] / 3


def test_fused_layers_keep_fewer_activations_where_the_run_uses_them(tmp_path, monkeypatch):
    def predict_with(kernels, device="cuda"):
        config = config_of(tmp_path, overrides=["train.precision=bf16", f"model.kernels={kernels}"])
        return predictor_of(config).predict(layout("fsdp2", device=device, microbatch=4))

    none, liger = predict_with("none"), predict_with("liger")
    assert liger.parts["activations"] < 0.85 * none.parts["activations"]
    assert liger.flops_per_token == none.flops_per_token and liger.parts["weights"] == none.parts["weights"]
    for spec, expected in ((None, none), ("installed", liger)):
        monkeypatch.setattr(fused_layers, "find_spec", lambda _, spec=spec: spec)
        assert predict_with("auto").parts == expected.parts
    assert predict_with("auto", device="cpu").parts == predict_with("none", device="cpu").parts


@pytest.mark.full
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "phi3"])
def test_the_stand_in_of_a_kernel_keeps_as_much_memory_as_the_kernel(model_type):
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    pytest.importorskip("triton", reason="triton is not installed")
    command = [sys.executable, "-m", "tests.memory.fused_program", model_type]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=os.environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    bytes_of = json.loads(done.stdout.splitlines()[-1])
    assert bytes_of["planned"] == bytes_of["fused"] < 0.8 * bytes_of["plain"]


def test_a_prediction_for_a_gpu_includes_its_libraries(tmp_path):
    before = dict(os.environ)
    predictor = predictor_of(config_of(tmp_path, overrides=["train.precision=bf16"]))
    found = predictor.predict(layout("fsdp2", device="cuda", microbatch=4))
    assert found.parts["libraries"] == (600 + 400) << 20
    assert found.flops_per_token == pytest.approx(predictor.predict(layout("fsdp2", microbatch=4)).flops_per_token)
    assert dict(os.environ) == before, "what is started later would inherit it"


WINDOWS = "sliding_window: 32, head_dim: 16, num_hidden_layers: 12"
EXPERTS = "num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 32, num_hidden_layers: 4"


@pytest.mark.parametrize(("model", "values"), [("gemma3_text", WINDOWS), ("qwen3_moe", EXPERTS), ("gpt_oss", WINDOWS)])
def test_models_with_several_kinds_of_layers_are_extrapolated_by_kind(monkeypatch, tmp_path, model, values):
    if model == "gpt_oss":
        values = f"{values}, num_local_experts: 4, num_experts_per_tok: 2"
    config = config_of(tmp_path, model=model, values=f"{SIZES}, {values}")
    few = predict(config, layout())
    monkeypatch.setattr(predicting, "MAX_KINDS", 0)
    whole = predict(config, layout())
    assert few.num_parameters == whole.num_parameters
    assert few.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.02)


BERT = f"{SIZES.replace(', num_key_value_heads: 2', '')}, num_hidden_layers: 4"


def test_classifiers_and_masked_models_are_predicted_with_their_tasks(tmp_path):
    for task in ("text_classification", "token_classification", "masked_lm"):
        found = predict(config_of(tmp_path, model="bert", values=BERT, task=task), layout())
        assert found.parts["activations"] > 0, task


def test_a_job_that_cannot_be_predicted_is_refused_with_the_reason(tmp_path):
    config = config_of(tmp_path)
    offloading = config.model_copy(update={"model": config.model.model_copy(update={"activation_offload": True})})
    with pytest.raises(ModelError, match=r"activation_offload: the activations that stay on the device"):
        predict(offloading, layout())


IN_THE_FULL_TIER = ("small/fsdp2/full", "small/zero3/lora/recomputed")


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name in IN_THE_FULL_TIER else pytest.mark.slow)
        for name in COMBINATIONS
    ],
)
def test_the_prediction_is_near_the_peak_of_real_processes(tmp_path, name, figure):
    """All 20 combinations: `pytest -m slow`; docs/proof/index.md links a table of them."""
    combination = COMBINATIONS[name]
    job = write_job(combination, tmp_path / "job")
    asked = layout(combination.strategy, combination.method, recomputes=combination.recomputes)
    predicted = predict(load_config(job, combination.overrides).config, asked)
    error = predicted.peak_bytes / measure_peak(combination, job) - 1
    figure(f"{name}: predicted peak of the measured, minus 1", abs(error), at_most=0.15)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_prediction_is_near_the_memory_that_a_gpu_allocates(tmp_path, figure):
    combination = COMBINATIONS["medium/single/lora"]
    job = write_job(combination, tmp_path / "job")
    allocated = measure_peak(combination, job)
    predicted = predict(load_config(job, combination.overrides).config, layout(method="lora", device="cuda"))
    tensors = predicted.peak_bytes - predicted.parts["libraries"]
    figure("predicted peak of max_memory_allocated, minus 1", abs(tensors / allocated - 1), at_most=0.10)
