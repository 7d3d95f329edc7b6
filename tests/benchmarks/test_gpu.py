"""The suite for a GPU counts correctly and runs; on tiny models, that is seen without one."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import gpu as script
import pytest
import torch
from gpu import RESERVE_SECONDS
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoConfig, AutoModelForCausalLM

from tests.devices import EVERY_DEVICE

from comparison.report import machine
from gpu_comparison import wheels
from gpu_comparison.cases import CASES, PART_SECONDS, TIMED, VARIANTS, WORKLOADS
from gpu_comparison.documents import documents, mean_length
from gpu_comparison.judgment import THRESHOLDS, judged, page, rates, shares
from gpu_comparison.kernels import RANGE, read_profile, table
from gpu_comparison.shapes import SHAPES

ROOT = Path(__file__).parents[2]


def model_of(shape):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(shape.model_type, **shape.values()))


@pytest.mark.parametrize("shape", [*SHAPES.values(), SHAPES["qwen3-0.6b"].tiny()], ids=str)
def test_the_weights_of_a_shape_are_counted_as_they_are(shape):
    assert shape.num_parameters == sum(weight.numel() for weight in model_of(shape).parameters())


def test_the_arithmetic_of_a_token():
    shape = SHAPES["llama-8b"]
    assert shape.weight_flops(is_lora=False) == 6 * shape.num_parameters
    assert shape.weight_flops(is_lora=True) == 4 * shape.num_parameters
    # 32 layers, 32 heads of 128: at 4,096 tokens causal attention adds a ninth to the 6 N of 8 billion weights
    assert shape.attention_flops(4096) == pytest.approx(6 * 32 * 4096 * 4096)


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
        **{
            "waits_per_step": 0.0,
            "weight_flops": 6.0 * 1.24e9,
            "attention_flops": 1e9,
            "lengths": "4096",
            "memory": {"allocated peak": 41.5},
        },
        "profile": {
            **{"kernels_per_step": 900.0, "busy_seconds": 0.02, "idle_share": 0.31, "waits": {}},
            "top": [["nvjet_tst", 0.015, 64.0]],
        },
        **more,
    }


NAMES = [case.name for case in CASES]
H100 = 989.4e12


def test_results_are_computed_from_records_and_missing_cases_are_listed():
    failed = {"error": "OutOfMemoryError: CUDA out of memory"}
    known = {
        "8B LoRA, ours": record(13_500),
        "3B LoRA, ours": record(28_000),
        "1B full, ours": record(70_000),
        "1B full, ours under fsdp2": record(67_000),
        "1B full, ours under zero3": record(60_000),
        "3B full bf16 weights, ours": record(24_000, weight_flops=6.0 * 3.21e9),
        "varying, ours": record(90),
        "varying, Trainer": record(40),
    }
    found = judged(NAMES, {**known, "3B full, ours": failed}, peak=H100)
    verdicts = {result.what: result.verdict for result in found.results}
    assert verdicts["8B LoRA at 4k"] == "met"
    assert verdicts["3B LoRA up to 768: memory"] == "met"
    assert verdicts["3B LoRA up to 768, scaled to an L40S"] == "MISSED"  # 10,868 on an L40S is 29,700 on an H100
    assert verdicts["1B full: MFU"] == "met"
    assert verdicts["3B full: MFU"] == "met"  # with weights in bf16
    assert verdicts["varying, ours / varying, Trainer: tokens/s"] == "met"
    assert verdicts["1B full, ours under fsdp2 / 1B full, ours: tokens/s"] == "met"
    assert verdicts["1B full, ours under zero3 / 1B full, ours: tokens/s"] == "MISSED"
    assert verdicts["waits for the device a step, between log points"] == "met"
    assert "8B LoRA at 4k in fp8: 8B LoRA, ours fp8: not run" in found.missing
    assert any("varying, TRL packing: not run" in line for line in found.missing)
    assert any("under zero2: not run" in line for line in found.missing)
    assert {row[0] for row in found.tables[0].rows} == {*known, "3B full, ours"}


def test_figures_outside_the_selected_cases_are_not_reported_as_missing():
    found = judged(["8B LoRA, ours"], {"8B LoRA, ours": record(13_500)}, peak=H100)
    assert len(found.results) == 2  # with the waits
    assert found.missing == []


def test_without_the_peak_of_the_gpu_its_share_is_missing_and_speed_is_not():
    found = judged(["1B full, ours", "8B LoRA, ours"], {name: record(13_500) for name in NAMES}, peak=None)
    assert found.results[0].what == "8B LoRA at 4k"
    assert [line.partition(": needs")[0] for line in found.missing] == ["1B full: MFU"]


def test_the_page_explains_missed_thresholds_by_kernels_and_memory():
    known = {"8B LoRA, ours": record(12_000), "1B full, ours": record(70_000)}
    text = page("one GPU", judged(NAMES, known, peak=H100))
    assert "### Profile of 8B LoRA, ours" in text
    assert "### Profile of 1B full, ours" not in text
    assert "idle 31.0%" in text and "allocated peak 41.5" in text
    assert "| `nvjet_tst` | 15.00 | 75.0% | 64 |" in text


def test_a_share_of_the_peak_is_tokens_times_arithmetic():
    one = record(1000)
    assert rates(one) == pytest.approx([1000.0] * TIMED)
    assert shares(one, peak=1e15) == pytest.approx([1000 * 6 * 1.24e9 / 1e15] * TIMED)
    assert shares(one, peak=1e15, with_attention=True) == pytest.approx([1000 * (6 * 1.24e9 + 1e9) / 1e15] * TIMED)


def test_every_case_has_a_name_of_its_own_and_every_workload_and_variant_a_case():
    assert len(set(NAMES)) == len(NAMES) >= 30
    assert {name.rpartition(", ")[0] for name in NAMES} == set(WORKLOADS)
    assert {name.rpartition(", ")[2] for name in NAMES} == set(VARIANTS)
    assert {name for each in THRESHOLDS for name in (*each.cases, each.divisor) if name} <= set(NAMES)


def test_each_part_fits_into_its_time_and_the_cases_with_a_threshold_come_before_the_others():
    import_seconds = 20.0
    seconds = Counter()
    for case in CASES:
        seconds[case.part] += case.seconds
    assert max(seconds.values()) + import_seconds + RESERVE_SECONDS <= PART_SECONDS == 240
    assert [case.part for case in CASES] == sorted(case.part for case in CASES)
    judging = {name for each in THRESHOLDS if each.limit for name in (each.cases[0], each.divisor) if name}
    assert judging <= {case.name for case in CASES if case.part < 3}


def gpu(*words, check=True):
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *map(str, words)]
    return subprocess.run(command, check=check, timeout=900, capture_output=True, text=True)


def test_a_report_needs_no_device_and_judges_what_the_folder_holds(tmp_path):
    cases = {name: record(100) for name in NAMES if name != "1B full, ours"}
    cases["8B LoRA, ours fp8"] = {"error": "MemoryError: a small GPU"}
    (tmp_path / "gpu.json").write_text(json.dumps({"machine": {**machine(), "peak_flops": 1e15}, "cases": cases}))
    done = gpu("--report", "--check", "--out", tmp_path, check=False)
    assert done.returncode == 1, done.stderr
    assert "1B full, ours under fsdp2 / 1B full, ours: tokens/s: 1B full, ours: not run" in done.stdout
    assert (tmp_path / "gpu.md").read_text().startswith("## One GPU")


def test_a_package_that_every_case_needs_is_named_before_anything_is_measured(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(script, "_is_installed", lambda name: name not in ("pydantic", "deepspeed"))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--tiny", "--device", "cpu", "--out", str(tmp_path / "out")])
    assert script.main() == 2
    assert capsys.readouterr().err.startswith("not installed: pydantic, which every case needs.")
    assert not (tmp_path / "out").exists()


def test_wheels_are_collected_in_their_order_until_the_folder_is_full(monkeypatch, capsys, tmp_path):
    def download(name, folder, *, python):
        if name == "flash_attn":
            return "ERROR: No matching distribution found for flash_attn"
        (folder / f"{name}-1-py3-none-any.whl").write_bytes(b"0" * (2**20 if name == "torchao" else 2**10))
        return None

    monkeypatch.setattr(wheels, "_collect", download)
    wheels.collect(tmp_path / "wheels", python="3.12", limit_mib=0.5)
    lines = capsys.readouterr().out.splitlines()
    assert "torchao (tests of fp8): the folder would have 1 MiB" in lines
    assert "flash_attn (rows on flash): ERROR: No matching distribution found for flash_attn" in lines
    assert len(list((tmp_path / "wheels").iterdir())) == len(wheels.NEEDED_FOR) - 2
    monkeypatch.setattr(wheels, "_collect", lambda *_, **__: "ERROR: no network")
    with pytest.raises(SystemExit, match="pydantic"):
        wheels.collect(tmp_path / "none", python="3.12", limit_mib=0.5)


QUICK = ("8B LoRA, ours", "8B LoRA, bare", "varying, T*", "varying, ours packs", "1B full, ours under fsdp2")


@pytest.mark.slow
def test_tiny_cases_run_without_a_gpu_and_a_killed_run_resumes_where_it_was(tmp_path):
    words = ("--tiny", "--device", "cpu", "--peak-tflops", 1, "--out", tmp_path)
    gpu(*words, "--only", QUICK[0])
    first = json.loads((tmp_path / "gpu.json").read_text())["cases"]
    gpu(*words)
    found = json.loads((tmp_path / "gpu.json").read_text())["cases"]
    assert first == {QUICK[0]: found[QUICK[0]]}
    errors = {name: each["error"] for name, each in found.items() if "error" in each}
    assert errors == {"varying, ours rows on flash": "left out: not installed: flash_attn"}
    assert set(found) == set(NAMES)


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
