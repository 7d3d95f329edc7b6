"""What a plan prints, at 80 and 120 columns, and its JSON, whose keys scripts rely on."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.commands.plan import plan as plan_command
from finetune.commands.plan.output import Plan, plan_json, print_plan
from finetune.commands.plan.plan import PlanOptions, make_plan
from finetune.config.load import load_config
from finetune.runtime.text.terminal import format_json
from tests.commands.plan.estimates import LLAMA_8B

Planned = Callable[..., Plan]

JSON_KEYS = {
    "": "version job machines assumptions planned_in_seconds",
    "job": "file method gradient_checkpointing precision global_batch_size tokens_per_position num_steps "
    "data_is_prepared",
    "machines.0": "gpu gpus_per_node num_nodes memory_bytes usable_bytes best why strategies variants outlook",
    "machines.0.strategies.0": "strategy num_gpus method gradient_checkpointing fits reason accelerate_file "
    "microbatch_size num_microbatches peak_bytes parts num_parameters num_trained flops_per_token "
    "recomputed_flops_per_token step_seconds step_parts hidden_communication_seconds",
    "machines.0.outlook": "step_seconds tokens_per_second mfu num_steps num_tokens hours checkpoints offers",
    "machines.0.outlook.checkpoints": "size_bytes stall_seconds write_seconds hours_between_failures interval_seconds "
    "every_steps",
    "machines.0.outlook.offers.0": "provider usd_per_gpu_hour usd usd_per_million_tokens source",
}


@pytest.mark.parametrize("place", JSON_KEYS)
def test_the_keys_of_the_json_stay(planned: Planned, place: str):
    """A key may be added here; one that goes or changes its meaning takes another `version`."""
    found = json.loads(format_json(plan_json(planned("8b", gpus="8xH100")), allow_nan=False))
    for step in filter(None, place.split(".")):
        found = found[int(step)] if step.isdigit() else found[step]
    assert list(found) == JSON_KEYS[place].split()


def test_the_json_of_a_job_that_fits_nowhere_is_whole(planned: Planned):
    found = json.loads(format_json(plan_json(planned("70b", gpus="1xT4")), allow_nan=False))
    (machine,) = found["machines"]
    assert (machine["best"], machine["outlook"]) == (None, None)
    assert all(each["fits"] is False for each in machine["strategies"])


@pytest.mark.parametrize("columns", [80, 120])
def test_the_chosen_line_comes_first_and_no_line_is_wider_than_the_terminal(
    planned: Planned, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", str(columns))
    print_plan(planned("8b", gpus="8xH100"))
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines) <= columns
    rows = [line.split() for line in lines]
    first = next(number for number, words in enumerate(rows) if words[:2] == ["strategy", "peak"]) + 2
    assert rows[first][0] == "fsdp2"
    assert any("accelerate_configs/fsdp2.yaml" in line for line in lines)
    for word in ("why", "memory", "step", "speed", "job", "price", "checkpoint", "or", "assumed"):
        assert any(words[:1] == [word] for words in rows), word


def test_a_plan_without_a_fitting_strategy_suggests_what_would_fit(
    planned: Planned, capsys: pytest.CaptureFixture[str]
):
    print_plan(planned("8b", gpus="1xT4"))
    printed = " ".join(capsys.readouterr().out.split())
    assert "No strategy fits on these GPUs. It would fit with QLoRA, model.gradient_checkpointing=true" in printed


def test_the_exit_code_of_plan_is_1_if_the_job_does_not_fit(
    job_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(plan_command, "MemoryPredictor", lambda *_: type("P", (), {"predict": staticmethod(LLAMA_8B)}))
    job = job_file("8b")
    assert plan_command.plan(job, [], PlanOptions(gpus="8xH100"), as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["machines"][0]["best"] == "fsdp2"
    assert plan_command.plan(job, [], PlanOptions(gpus="1xT4"), as_json=False) == 1


def test_the_estimate_of_compiling_is_printed(planned: Planned, capsys: pytest.CaptureFixture[str]):
    print_plan(planned("8b", "model.compile=auto", "model.kernels=none", gpus="8xH100"))
    assert "regional: compiling takes about 60 s and saves about" in " ".join(capsys.readouterr().out.split())


@pytest.mark.full
def test_the_symbolic_step_predicts_every_strategy(job_file: Callable[..., Path]):
    """12 layers of width 768: weights, gradients and moments are 16 bytes for each parameter on one GPU."""
    plan = make_plan(load_config(job_file("125m"), []), PlanOptions(gpus="2xL4"))
    (found,) = plan.machines
    fitting = {each.strategy: each.prediction for each in found.plans if each.fits}
    assert fitting.keys() >= {"ddp", "fsdp2", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"}
    ddp = fitting["ddp"]
    assert ddp is not None and ddp.peak_bytes > 16 * ddp.num_parameters and ddp.num_parameters == ddp.num_trained
    assert found.best is not None and found.outlook is not None
