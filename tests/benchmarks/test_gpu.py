"""The suite for a GPU counts rightly and runs; in small, that is seen without one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gpu_comparison.cases import TIMED, Case, cases, one_of_each
from gpu_comparison.documents import documents, mean_length
from gpu_comparison.results import measured, rates, shares
from gpu_comparison.shapes import SHAPES, peak_flops, tiny, weight_flops

ROOT = Path(__file__).parents[2]


def model_of(shape):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(shape.model_type, **shape.values()))


@pytest.mark.parametrize("shape", [*SHAPES.values(), tiny(SHAPES["qwen3-0.6b"])], ids=lambda shape: shape.name)
def test_the_weights_of_a_shape_are_counted_as_they_are(shape):
    assert shape.num_parameters == sum(weight.numel() for weight in model_of(shape).parameters())


def test_the_arithmetic_of_a_token():
    assert weight_flops(100, is_lora=False) == 600
    assert weight_flops(100, is_lora=True) == 400
    # 32 layers, 32 heads of 128: at 4,096 tokens causal attention adds a ninth to the 6 N of 8 billion weights
    assert SHAPES["llama-8b"].attention_flops(4096) == pytest.approx(6 * 32 * 4096 * 4096)
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("something else") is None


def test_documents_are_the_same_for_everybody_and_end_with_the_end():
    rows = documents(50, length=128, varies=True, vocabulary=512)
    assert rows == documents(50, length=128, varies=True, vocabulary=512)
    assert {row[-1] for row in rows} == {2}
    assert len({len(row) for row in rows}) > 10
    assert max(map(len, rows)) <= 128
    assert mean_length([[0] * 10, [0] * 30]) == 25  # where most tokens stand, documents are long


def record(rate, **more):
    """A record of steps of 100 tokens at this rate."""
    spans = [100 / rate] * TIMED
    return {
        **{"step_tokens": [100] * TIMED, "step_seconds": spans, "phases": {"forward": 0.01}, "peak_bytes": 2**30},
        **{"waits_per_step": 0.0, "mean_length": 4096.0, "lengths": "4096"},
        **more,
    }


def test_results_are_read_off_the_records_and_what_is_not_there_is_named():
    failed = {"error": "OutOfMemoryError: CUDA out of memory"}
    known = {
        "8B LoRA, ours": record(13_500),
        "3B full bf16 weights, ours": record(24_000),
        "varying, ours": record(90),
        "varying, Trainer": record(40),
    }
    found = measured(cases(), {**known, "1B full, ours": failed}, peak=989.4e12, is_tiny=False)
    verdicts = {result.what: result.verdict for result in found.results}
    assert verdicts["8B LoRA at 4k, eager"] == "met"
    assert verdicts["3B full: MFU"] == "met"
    assert verdicts["varying, ours / varying, Trainer: tokens/s"] == "met"
    assert verdicts["waits for the device a step, between log points"] == "met"
    assert any("CUDA out of memory" in line for line in found.missing)
    assert any("varying, TRL packing: not run" in line for line in found.missing)
    assert {row[0] for row in found.tables[0].rows} == {*known, "1B full, ours"}


def test_a_share_of_the_peak_is_tokens_times_arithmetic():
    case = Case("full", "ours", "llama-1b")
    share = shares(case, record(1000), peak=1e15, is_tiny=False, with_attention=False)
    assert share == pytest.approx([1000 * 6 * SHAPES["llama-1b"].num_parameters / 1e15] * TIMED)
    assert rates(record(1000)) == pytest.approx([1000.0] * TIMED)


def test_every_case_has_a_name_of_its_own():
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names) > 20
    assert len(one_of_each()) == 12


@pytest.mark.slow
def test_in_small_every_path_runs_without_a_gpu(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--tiny", "--device", "cpu", "--out", str(tmp_path)]
    subprocess.run(command, check=True, timeout=900)
    found = json.loads((tmp_path / "gpu.json").read_text())["cases"]
    errors = {name: each["error"] for name, each in found.items() if "error" in each}
    assert errors == {"varying, ours rows on flash": "ModuleNotFoundError: flash_attn is not installed"}
    assert len(found) == 12
