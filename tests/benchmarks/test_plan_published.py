"""Published runs as jobs, of two tables with a row or two each: what is read, planned, counted and fitted."""

from pathlib import Path

import plan_published as benchmark
import pytest

MPT = """\
Model,SeqLen (T),# GPUs,GPU,MicroBatchSize,GradAccum,Throughput (T/s/GPU),Precision,Activation Checkpointing
125m,2048,8,a100_80gb,32,2,141737,amp_bf16,False
125m,512,8,a100_40gb,104,3,156735,amp_bf16,True
1b,512,8,h100_80gb,56,4,70315,amp_fp8,False
"""
PEFT = """\
experiment,target_modules,batch_size,mem_max_GiB,tok_per_s_median
lora/llama-3.2-3B-rank32,"['v_proj', 'q_proj']",4,20.762,7194.3
lora/llama-3.2-3B-rank32-lorafa,"['v_proj', 'q_proj']",4,20.713,5420.7
waveft/llama-3.2-3B-n_frequency-5000,"['v_proj', 'q_proj']",4,23.186,3226.7
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "llm-foundry-mpt-throughput.csv").write_text(MPT)
    (tmp_path / "peft-metamathqa-l40s.csv").write_text(PEFT)
    return tmp_path


def test_rows_in_bf16_and_fp8_and_with_methods_of_this_package_are_read(folder):
    mpt, peft = list(benchmark.of_llm_foundry(folder)), list(benchmark.of_peft(folder))
    assert [(row.gpus, row.samples, row.recomputes, row.precision, row.part) for row in mpt] == [
        ("8xA100-80GB", 32, False, "bf16", benchmark.FITTED),
        ("8xA100-40GB", 104, True, "bf16", benchmark.HELD_OUT),
        ("8xH100-80GB", 56, False, "fp8", benchmark.HELD_OUT),
    ]
    assert [row.name for row in peft] == ["peft lora/rank32"]
    assert peft[0].adapter == "lora: {rank: 32, target_modules: ['v_proj', 'q_proj']}"


def test_a_row_is_planned_by_its_symbolic_step(folder, tmp_path):
    planned = benchmark.plan(next(benchmark.of_llm_foundry(folder)), tmp_path)
    assert planned.prediction.num_parameters == pytest.approx(124e6, rel=0.01)  # the published 125 have positions
    assert planned.peak_bytes - planned.prediction.peak_bytes == 32 * 2048 * 50368 * 4
    assert planned.fits and abs(planned.error) < 0.3


def test_the_page_has_each_row_and_the_fit_meets_a_single_one(folder, tmp_path):
    planned = [benchmark.plan(row, tmp_path) for row in benchmark.of_llm_foundry(folder)]
    text = benchmark.page([*planned, *(benchmark.plan(row, tmp_path) for row in benchmark.of_peft(folder))])
    assert "| llm-foundry 125m * | 8xA100-80GB | 2048 x 32 x 2 | no | 141,737 |" in text
    assert "| peft lora/rank32 | 1xL40S | 768 x 4 x 1 | no | 7,194 |" in text
    assert benchmark.fit(planned).startswith("1 rows: TRAINING_SHARE 0.")
