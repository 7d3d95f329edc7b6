"""The suite for a GPU counts rightly and runs; in small, that is seen without one."""

import json
import subprocess
import sys
from pathlib import Path

import gpu as script
import pytest
import torch
from gpu import RESERVE_SECONDS
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoConfig, AutoModelForCausalLM

from tests.devices import EVERY_DEVICE

from comparison.report import machine
from gpu_comparison.cases import TIMED, Case, cases, one_of_each
from gpu_comparison.documents import documents, mean_length
from gpu_comparison.kernels import RANGE, read_profile, table
from gpu_comparison.rates import rates, shares
from gpu_comparison.results import measured, page
from gpu_comparison.shapes import SHAPES, peak_flops, tiny, weight_flops
from gpu_comparison.thresholds import LORA_LIMITS, MFU_LIMITS, RATIOS, SHORT_LORA_CASE

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
        **{"waits_per_step": 0.0, "mean_length": 4096.0, "lengths": "4096", "memory": {"allocated peak": 41.5}},
        "profile": {
            **{"kernels_per_step": 900.0, "busy_seconds": 0.02, "idle_share": 0.31, "waits": {}},
            "top": [["nvjet_tst", 0.015, 64.0]],
        },
        **more,
    }


def judged(known):
    return measured(cases(), known, peak=989.4e12, is_tiny=False)


def test_results_are_computed_from_records_and_missing_cases_are_listed():
    failed = {"error": "OutOfMemoryError: CUDA out of memory"}
    known = {
        "8B LoRA, ours": record(13_500),
        "3B LoRA, ours": record(28_000),
        "1B full, ours": record(70_000),
        "1B full, ours under fsdp2": record(67_000),
        "1B full, ours under zero3": record(60_000),
        "3B full bf16 weights, ours": record(24_000),
        "varying, ours": record(90),
        "varying, Trainer": record(40),
    }
    found = judged({**known, "3B full, ours": failed})
    verdicts = {result.what: result.verdict for result in found.results}
    assert verdicts["8B LoRA at 4k"] == "met"
    assert verdicts["3B LoRA up to 768: memory"] == "met"
    assert verdicts["3B LoRA up to 768"] == "MISSED"  # 10,868 on an L40S is 29,700 on an H100
    assert verdicts["1B full: MFU"] == "met"
    assert verdicts["3B full: MFU"] == "met"  # with weights in bf16
    assert verdicts["varying, ours / varying, Trainer: tokens/s"] == "met"
    assert verdicts["1B full, ours under fsdp2 / 1B full, ours: tokens/s"] == "met"
    assert verdicts["1B full, ours under zero3 / 1B full, ours: tokens/s"] == "MISSED"
    assert verdicts["waits for the device a step, between log points"] == "met"
    assert any("varying, TRL packing: not run" in line for line in found.missing)
    assert any("under zero2: not run" in line for line in found.missing)
    assert {row[0] for row in found.tables[0].rows} == {*known, "3B full, ours"}


def test_figures_outside_the_selected_cases_are_not_reported_as_missing():
    (lora,) = (case for case in cases() if case.name == "8B LoRA, ours")
    found = measured([lora], {lora.name: record(13_500)}, peak=989.4e12, is_tiny=False)
    assert len(found.results) == 2  # with the waits
    assert found.missing == []


def test_the_page_explains_missed_thresholds_by_kernels_and_memory():
    known = {"8B LoRA, ours": record(12_000), "1B full, ours": record(70_000)}
    text = page("one GPU", cases(), known, found=judged(known), peak=989.4e12, is_tiny=False)
    assert "### Profile of 8B LoRA, ours" in text
    assert "### Profile of 1B full, ours" not in text
    assert "idle 31.0%" in text and "allocated peak 41.5" in text
    assert "| `nvjet_tst` | 15.00 | 75.0% | 64 |" in text


def test_a_share_of_the_peak_is_tokens_times_arithmetic():
    case = Case("full", "ours", "llama-1b")
    share = shares(case, record(1000), peak=1e15, is_tiny=False, with_attention=False)
    assert share == pytest.approx([1000 * 6 * SHAPES["llama-1b"].num_parameters / 1e15] * TIMED)
    assert rates(record(1000)) == pytest.approx([1000.0] * TIMED)


def test_every_case_has_a_name_of_its_own():
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names) > 20
    assert len(one_of_each()) == 16


def test_cases_with_a_threshold_fit_into_the_time_budget():
    names = {SHORT_LORA_CASE, *(names[0] for names, _ in LORA_LIMITS.values())}
    names |= {names[0] for names, _ in MFU_LIMITS.values()}
    names |= {name for ours, other, _ in RATIOS for name in (ours, other)}
    first = cases()[: len(names)]
    assert {case.name for case in first} == names
    assert sum(case.seconds for case in first) + RESERVE_SECONDS <= 480


def gpu(*words, check=True):
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *map(str, words)]
    return subprocess.run(command, check=check, timeout=900, capture_output=True, text=True)


def test_results_of_several_calls_are_merged_and_no_case_is_measured_twice(tmp_path):
    file = tmp_path / "earlier.json"
    earlier = {
        "machine": machine(),
        "cases": {case.name: record(100) for case in cases() if case.name != "1B full, bare"},
    }
    file.write_text(json.dumps(earlier))
    words = ("--merge", file, "--budget-seconds", 0, "--peak-tflops", 1, "--out", tmp_path, "--device", "cpu")
    done = gpu(*words, "--check", check=False)
    assert done.returncode == 1, done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["cases"]["8B LoRA, ours"]["step_tokens"] == [100] * TIMED
    assert found["cases"]["1B full, bare"]["error"].startswith("left out:")
    assert (tmp_path / "gpu.md").read_text().startswith("## One GPU")
    file.write_text(json.dumps({**earlier, "machine": {**machine(), "processor": "another"}}))
    assert "was measured elsewhere: processor differ" in gpu(*words, check=False).stderr


def test_a_package_that_every_case_needs_is_asked_for_at_the_start(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(script, "_is_installed", lambda name: name not in ("pydantic", "deepspeed"))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--tiny", "--device", "cpu", "--out", str(tmp_path / "out")])
    assert script.main() == 2
    assert capsys.readouterr().err.startswith("missing here: pydantic, without which none of our cases runs.")
    assert not (tmp_path / "out").exists()


def test_cases_whose_package_is_not_there_are_left_out_and_not_asked_for(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(script, "_is_installed", lambda name: name != "deepspeed")
    words = ["--only", "1B full, ours under zero2", "--device", "cpu", "--tiny", "--check", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
    assert script.main() == 0
    assert "left out: deepspeed (1B full, ours under zero2)" in capsys.readouterr().out


@pytest.mark.slow
def test_in_small_every_path_runs_without_a_gpu(tmp_path):
    gpu("--tiny", "--device", "cpu", "--peak-tflops", 1, "--out", tmp_path)
    found = json.loads((tmp_path / "gpu.json").read_text())["cases"]
    errors = {name: each["error"] for name, each in found.items() if "error" in each}
    assert errors == {"varying, ours rows on flash": "left out: not installed: flash_attn"}
    assert len(found) == 16


@EVERY_DEVICE
def test_a_profile_names_the_work_and_the_waits(device, figure):
    size, times = (64, 3) if device == "cpu" else (8192, 10)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    (matrix @ matrix).sum().item()
    with profile(activities=kinds) as profiled, record_function(RANGE):
        for _ in range(times):
            with record_function("named by somebody"):
                product = matrix @ matrix
        product.sum().item()
    found = read_profile(profiled.profiler.kineto_results.events(), num_steps=1)
    counts = {name: count for name, _, count in found["top"]}
    assert not {"named by somebody", RANGE} & set(counts)
    if device == "cuda":
        assert sum(found["waits"].values()) >= 1
        share = max(seconds for _, seconds, _ in found["top"]) / found["busy_seconds"]
        figure("matrix products among the kernels of ten of 8192, share", share, at_least=0.9)
        figure("time between them in which the device is idle, share", found["idle_share"], at_most=0.2)
        assert f"| `{found['top'][0][0][:90]}` |" in "\n".join(table(found))
    else:
        assert (counts, found["waits"], found["idle_share"]) == ({}, {}, 1.0)
