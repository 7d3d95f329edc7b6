"""Liger's kernels, in Triton's interpreter, equal the model's operations; other layers get none."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune.model.kernels import fused_layers

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
pytest.importorskip("triton", reason="triton is not installed")

NORM, SWIGLU, GEGLU, ROTARY = "RMSNorm", "SwiGLU", "GeGLU", "rotary embedding"

MODELS: dict[str, dict[str, int]] = {
    "llama": {SWIGLU: 2, NORM: 5, ROTARY: 1},
    "qwen3": {SWIGLU: 2, NORM: 9, ROTARY: 1},
    "gemma2": {GEGLU: 2, NORM: 9, ROTARY: 1},
    "gemma3_text": {GEGLU: 2, NORM: 13, ROTARY: 1},
    "phi3": {SWIGLU: 2, NORM: 5, ROTARY: 1},
    "olmo2": {SWIGLU: 2, NORM: 9, ROTARY: 1},
    "mixtral": {NORM: 5, ROTARY: 1},
    "glm4": {SWIGLU: 2, NORM: 9},  # it rotates pairs of neighbors, half of each head
    "cohere2": {SWIGLU: 2},  # its norm subtracts the mean
    "gpt_neox": {ROTARY: 1},  # LayerNorm, and a plain MLP
    "apertus": {NORM: 9, ROTARY: 1},  # its MLP has no gate
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.model.kernels.fused_on_cpu", *MODELS]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, env=os.environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout)
    return results


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_kernels_has_the_loss_and_gradients_of_the_model_without(found: dict[str, Any], name: str):
    model = found["models"][name]
    assert model["counts"] == MODELS[name]
    assert model["loss"] < 1e-5 and model["gradients"] < 1e-5
    assert model["keeps_names"] and model["is_own_copy"]
    num_mlps = MODELS[name].get(SWIGLU, 0) + MODELS[name].get(GEGLU, 0)
    product_bytes = 18 * 48 * 4  # of 18 tokens, 48 wide, in float32
    assert num_mlps * product_bytes <= model["recomputed_bytes"] < (num_mlps + 1) * product_bytes


@pytest.mark.full
def test_chunks_of_the_loss_have_the_sums_and_gradients_of_our_own_operations(found: dict[str, Any]):
    assert len(found["chunks"]) == 8
    assert {name: error for name, error in found["chunks"].items() if error > 2e-6} == {}


@pytest.mark.full
def test_a_layer_that_only_looks_like_a_gated_mlp_gets_no_kernel(found: dict[str, Any]):
    assert found["odd"] == {}


def test_kernels_on_a_gpu_need_what_triton_needs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused_layers, "missing_triton_toolchain", lambda: "triton needs a C compiler")
    assert fused_layers.missing_kernel_requirement("cuda") == "triton: triton needs a C compiler"
    monkeypatch.setattr(fused_layers, "missing_triton_toolchain", lambda: None)
    assert fused_layers.missing_kernel_requirement("cuda") is None
