"""What a plan prints, at 80 and 120 columns, and its JSON, whose keys scripts rely on."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.commands.plan import plan as plan_command
from finetune.commands.plan.output import Plan, plan_json, print_plan
from finetune.commands.plan.plan import PlanOptions
from finetune.runtime.text.terminal import format_json
from tests.commands.plan.estimates import LLAMA_8B

Planned = Callable[..., Plan]

JSON_KEYS = {
    "": "version job machines assumptions planned_in_seconds",
    "job": "file method gradient_checkpointing precision global_batch_size tokens_per_position num_steps "
    "data_is_prepared",
    "machines.0": "gpu gpus_per_node num_nodes memory_bytes usable_bytes fits best why strategies variants outlook "
    "scaling",
    "machines.0.strategies.0": "strategy num_gpus method gradient_checkpointing fits reason accelerate_file "
    "microbatch_size num_microbatches peak_bytes parts num_parameters num_trained flops_per_token "
    "recomputed_flops_per_token step_seconds step_parts hidden_communication_seconds",
    "machines.0.outlook": "tokens_per_second step_seconds num_steps num_tokens hours mfu checkpoints prices",
    "machines.0.outlook.checkpoints.spot": "size_bytes stall_seconds write_seconds hours_between_failures "
    "young_seconds interval_seconds every_steps",
    "machines.0.outlook.prices.0": "provider offer usd_per_gpu_hour hours usd usd_per_million_tokens source",
    "machines.0.scaling": "points serial_share most_that_pay",
    "machines.0.scaling.points.0": "num_gpus tokens_per_second usd_per_gpu_hour strategy microbatch_size efficiency "
    "tokens_per_usd",
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
    assert (machine["fits"], machine["best"], machine["outlook"]) == (False, None, None)
    assert all(each["fits"] is False for each in machine["strategies"])
    assert all(each["num_gpus"] > 1 for each in machine["scaling"]["points"])


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
    assert rows[first][0] == "fsdp2" and lines[first].endswith("recommended")
    assert any("accelerate_configs/fsdp2.yaml" in line for line in lines)
    for word in ("why", "memory", "step", "speed", "job", "checkpoint", "assumed"):
        assert any(words[:1] == [word] for words in rows), word


@pytest.mark.usefixtures("no_gpu")
def test_several_machines_get_a_line_each(
    planned: Planned, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "100")
    print_plan(planned("8b"))
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("1x RTX4090") and "does not fit" in line for line in lines)
    assert any(line.startswith("8x H100-80GB") and "fsdp2" in line and "$" in line for line in lines)
    assert any("This machine has no GPU" in line for line in lines)


def test_a_plan_without_a_fitting_strategy_suggests_what_would_fit(
    planned: Planned, capsys: pytest.CaptureFixture[str]
):
    print_plan(planned("8b", gpus="1xT4"))
    printed = capsys.readouterr().out
    assert "No strategy fits on these GPUs. It would fit with QLoRA" in printed


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
