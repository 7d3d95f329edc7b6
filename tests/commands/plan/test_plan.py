"""What an earlier run of the job has measured replaces what is assumed."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from finetune.commands.plan import plan as planning
from finetune.commands.plan.output import Plan
from finetune.commands.plan.plan import PlanOptions, make_plan, read_measured_run
from finetune.config.load import load_config
from finetune.config.run_config import RunConfig
from finetune.memory.state import Prediction, TrainingLayout
from tests.commands.plan.estimates import LLAMA_8B

Planned = Callable[..., Plan]


def write_run(folder: Path, *, rate: float, num_steps: int = 10, gpu: str = "NVIDIA H100 80GB HBM3") -> None:
    """Write a run of fsdp2 on 8 of these GPUs at so many tokens per second, after three slow steps."""
    folder.mkdir()
    started = {"event": "RunStarted", "step": 0, "strategy": "fsdp2 on 8 processes splits parameters"}
    seconds = [30.0] * 3 + [2.0] * (num_steps - 3)
    steps = [
        {
            "event": "StepTaken",
            "step": number,
            "num_tokens": round(rate * (each - 0.5)),
            "seconds": each,
            "data_seconds": 0.5,
        }
        for number, each in enumerate(seconds, start=1)
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [started, *steps]))
    facts = {"devices": [{"type": "cuda", "name": gpu}], "launcher": {"WORLD_SIZE": "8"}}
    (folder / "environment.json").write_text(json.dumps(facts))


def test_a_run_is_read_without_its_first_steps_and_without_waiting_for_data(tmp_path: Path):
    write_run(tmp_path / "run", rate=40_000.0)
    found = read_measured_run(tmp_path / "run")
    assert found is not None
    assert (found.gpu.name, found.num_gpus, found.strategy, found.num_steps) == ("H100-80GB", 8, "fsdp2", 7)
    assert found.tokens_per_second == pytest.approx(40_000.0)


def test_times_on_that_kind_of_gpu_are_those_that_were_measured(planned: Planned, tmp_path: Path):
    """With one sample per microbatch, as the job was run, the plan has the run's pace; other kinds keep theirs."""
    before = planned("8b", gpus="8xH100").machines[0].outlook
    other = planned("8b", gpus="8xA100-80GB").machines[0].outlook
    assert before is not None and other is not None
    write_run(tmp_path / "run", rate=before.tokens_per_second / 2)
    plan = planned("8b", gpus="8xH100")
    after = plan.machines[0].outlook
    assert after is not None
    assert after.tokens_per_second == pytest.approx(before.tokens_per_second / 2, rel=0.05)
    assert any(sentence.startswith("Efficiency is measured: 7 steps") for sentence in plan.assumptions)
    assert planned("8b", gpus="8xA100-80GB").machines[0].outlook == other


def test_no_run_few_steps_or_an_unknown_gpu_measure_nothing(tmp_path: Path):
    assert read_measured_run(tmp_path / "none") is None
    write_run(tmp_path / "few", rate=1.0, num_steps=6)
    assert read_measured_run(tmp_path / "few") is None
    write_run(tmp_path / "other", rate=1.0, gpu="NVIDIA GeForce GT 710")
    assert read_measured_run(tmp_path / "other") is None


@pytest.mark.parametrize("gpus", ["1xH100", "2xH100"])
def test_the_scaling_table_takes_the_simplest_strategy_from_one_gpu_as_from_two(planned: Planned, gpus: str):
    """LoRA of 8B fits on one H100, so that ddp does on more; a plan for one GPU has no plan of ddp of its own."""
    points = planned("8b", "model.lora={rank: 16}", "model.dtype=bfloat16", gpus=gpus).machines[0].points
    assert [point.num_gpus for point in points] == [1, 2, 4, 8, 16, 32, 64]
    assert {point.strategy for point in points if point.num_gpus > 1} == {"ddp"}
    assert points[0].strategy == "single"


class EstimatedStep:
    """Predicts as the symbolic step would, in microseconds: with liger's kernels, steps keep fewer activations."""

    def __init__(self, config: RunConfig, layout: object) -> None:
        self.uses_liger = config.model.kernels == "liger"

    def predict(self, layout: TrainingLayout) -> Prediction:
        plain = LLAMA_8B(layout)
        saved = plain.parts["activations"] // 2 if self.uses_liger else 0
        parts = {**plain.parts, "activations": plain.parts["activations"] - saved}
        return replace(plain, parts=parts, peak_bytes=plain.peak_bytes - saved)


def liger_sentences(path: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str, is_installed: bool) -> list[str]:
    monkeypatch.setattr(planning, "MemoryPredictor", EstimatedStep)
    monkeypatch.setattr(planning, "find_spec", lambda name: "installed" if is_installed else None)
    plan = planning.make_plan(load_config(path, overrides), planning.PlanOptions(gpus="8xH100"))
    return [sentence for sentence in plan.assumptions if "liger" in sentence]


def test_a_plan_without_liger_names_what_its_kernels_would_give(
    job_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    """Smaller memory at microbatches as large, or larger microbatches."""
    path, auto = job_file("8b"), ("model.kernels=auto", "train.microbatch_size=1")
    (sentence,) = liger_sentences(path, monkeypatch, *auto, is_installed=False)
    assert "[kernels]" in sentence
    numbers = re.findall(r"([\d.]+) (s|GiB)\b", sentence)
    assert [unit for _, unit in numbers] == ["s", "s", "GiB", "GiB"]
    fused_seconds, seconds, fused_gib, gib = (float(number) for number, _ in numbers)
    assert 0 < fused_seconds <= seconds
    fused_microbatch, microbatch = map(int, re.findall(r"microbatches of (\d+) and (\d+)", sentence)[0])
    assert (fused_gib < gib) if fused_microbatch == microbatch else (fused_microbatch > microbatch)
    assert liger_sentences(path, monkeypatch, *auto, is_installed=True) == []
    assert liger_sentences(path, monkeypatch, is_installed=False) == []  # `model.kernels: none`


@pytest.mark.full
def test_the_symbolic_step_predicts_every_strategy(job_file: Callable[..., Path]):
    """12 layers of width 768: weights, gradients and moments are 16 bytes for each parameter on one GPU."""
    plan = make_plan(load_config(job_file("125m"), []), PlanOptions(gpus="2xL4"))
    (found,) = plan.machines
    fitting = {each.strategy for each in found.plans if each.fits}
    assert fitting >= {"ddp", "fsdp2", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"}
    ddp = next(each.fit for each in found.plans if each.strategy == "ddp")
    assert ddp is not None and ddp.smallest.peak_bytes > 16 * ddp.smallest.num_parameters
    assert ddp.smallest.num_parameters == ddp.smallest.num_trained
    assert found.best is not None and found.outlook is not None
