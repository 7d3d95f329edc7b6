"""A replayed run is the same after harmless changes, and every planted regression is named where it is."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

from finetune.commands.verify import replay
from finetune.commands.verify.replay import TOLERANCES, ReplayTolerance, run_replay, step_differences
from finetune.config.load import load_config
from finetune.data.batch import Batch
from finetune.errors import UserError
from finetune.run.in_process import isolated_run, train_in_process
from finetune.run.setup import training_data
from finetune.task.causal_lm import CausalTask
from finetune.task.lm_loss.target_loss import log_probabilities_at_targets
from finetune.train.optim import parameter_groups
from tests.launching import accelerate_command, capture
from tests.small_job import JOB, write_job

SHARP = JOB.replace("tie_word_embeddings: true", "tie_word_embeddings: true, initializer_range: 0.3").replace(
    "learning_rate: 1e-2", "learning_rate: 1e-2\n  optimizer: {weight_decay: 0.1}"
)
"""Attention depends on positions, as in a pretrained model: at the usual range all positions count nearly alike."""


def record(folder: Path, *overrides: str) -> Path:
    job = write_job(folder, text=SHARP)
    quick = ("train.steps=6", "checkpoint.every_steps=4", "run.record_layers=true", *overrides)
    result = train_in_process(load_config(job, quick))
    assert result.num_steps == 6
    return folder / "runs/job"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("replay"))


@pytest.fixture(scope="module")
def bf16_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("replay-bf16"), "train.precision=bf16")


Judged = Callable[..., tuple[int, str]]


@pytest.fixture
def judge(capsys: pytest.CaptureFixture[str]) -> Judged:
    def replayed(run: Path, *, start: int | None = None, layers: bool = True, overrides: tuple[str, ...] = ()) -> Any:
        before = contents(run)
        capsys.readouterr()
        with isolated_run():
            code = run_replay(run, num_steps=3, start=start, layers=layers, overrides=overrides)
        assert contents(run) == before, "the run folder is not changed"
        return code, capsys.readouterr().out

    return replayed


def contents(run: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in run.rglob("*") if path.is_file()}


@contextmanager
def other_environment(run: Path) -> Iterator[None]:
    """Have the run recorded by another torch, on another machine."""
    path = run / "environment.json"
    text = path.read_text()
    recorded = json.loads(text)
    recorded["packages"]["torch"] = "2.9.0"
    path.write_text(json.dumps(recorded | {"hostname": "elsewhere", "platform": "Other", "num_cpus": 96}))
    try:
        yield
    finally:
        path.write_text(text)


def wrap_init(monkeypatch: pytest.MonkeyPatch, kind: type, change: Callable[..., object], *, before: bool = False):
    init = kind.__init__

    def changed(self, config, *args, **named):
        if before:
            change(config)
        init(self, config, *args, **named)
        if not before:
            change(self)

    monkeypatch.setattr(kind, "__init__", changed)


def plant_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(config):
        config.rope_parameters["rope_theta"] = 500_000.0

    wrap_init(monkeypatch, modeling_llama.LlamaRotaryEmbedding, change, before=True)


def plant_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    wrap_init(monkeypatch, modeling_llama.LlamaAttention, lambda layer: setattr(layer, "scaling", layer.scaling * 1.01))


def plant_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    wrap_init(monkeypatch, modeling_llama.LlamaAttention, lambda layer: setattr(layer, "attention_dropout", 0.1))


def plant_token(monkeypatch: pytest.MonkeyPatch) -> None:
    load = training_data.load_processing

    def with_token(*args, **named):
        processing = load(*args, **named)
        assert processing.tokenizer.add_tokens(["red"]) == 1
        return processing

    monkeypatch.setattr(training_data, "load_processing", with_token)


def plant_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_groups, "_is_vector", lambda *_: False)


def plant_mean_per_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_sums(self: CausalTask, model: Any, batch: Batch) -> dict[str, torch.Tensor]:
        assert batch.targets is not None
        share = batch.num_targets / len(batch.targets.per_row)
        weights = torch.cat([torch.full((count,), share / count) for count in batch.targets.per_row if count])
        return {"loss_sum": -(log_probabilities_at_targets(model, batch) * weights).sum()}

    monkeypatch.setattr(CausalTask, "loss_sums", loss_sums)


def test_another_machine_another_torch_and_another_microbatch_give_the_same(run, judge):
    with other_environment(run):
        code, output = judge(run, overrides=("train.microbatch_size=1",))
    assert code == 0, output
    assert "changed since the run: torch 2.9.0 ->" in output
    assert "elsewhere" not in output
    assert f"outputs of 4 of 4 modules compared at step 1{chr(10)}" in output, (
        "bits are compared only where they can be"
    )


def test_another_rope_is_named_at_the_first_layer_that_has_it(run, judge, monkeypatch):
    plant_rope(monkeypatch)
    with other_environment(run):
        code, output = judge(run)
    assert code == 1
    assert "step 1: loss " in output and "step 2: " not in output
    assert "step 1: output of model.layers.0: " in output
    assert "modules compared at step 1, 1 of them bitwise equal" in output, "the embeddings are"
    assert "changed since the run: torch 2.9.0 ->" in output


def test_a_loss_that_averages_per_row_differs_although_no_layer_does(run, judge, monkeypatch):
    plant_mean_per_row(monkeypatch)
    code, output = judge(run)
    assert code == 1
    assert "step 1: loss " in output and "output of" not in output
    assert "outputs of 4 of 4 modules compared at step 1, 4 of them bitwise equal" in output


@pytest.mark.full
def test_another_attention_scale_is_named_at_its_layer(run, judge, monkeypatch):
    plant_scale(monkeypatch)
    code, output = judge(run)
    assert code == 1 and "step 1: output of model.layers.0: " in output


@pytest.mark.full
def test_dropout_that_is_left_on_is_named_at_its_layer(run, judge, monkeypatch):
    plant_dropout(monkeypatch)
    code, output = judge(run)
    assert code == 1 and "step 1: output of model.layers.0: " in output
    with pytest.raises(UserError, match=r"dropout is on \(2 places, such as model.layers.0.self_attn\)"):
        judge(run, overrides=("train.microbatch_size=1",))


@pytest.mark.full
def test_a_tokenizer_with_another_token_gives_other_samples(run, judge, monkeypatch):
    plant_token(monkeypatch)
    code, output = judge(run)
    assert code == 1
    assert "step 1: other samples (250 tokens in the record, " in output
    assert "not the content that the run read: " in output and "tokenizer" in output


@pytest.mark.full
@pytest.mark.parametrize("start", [None, 4])
def test_decay_of_the_norms_is_named_before_a_step_shows_it(run, judge, monkeypatch, start):
    plant_decay(monkeypatch)
    code, output = judge(run, start=start, layers=start is None)
    assert code == 1
    change = "parameter groups: weight_decay 0.0 in the record, weight_decay 0.1 now: model.layers.*.input_layernorm"
    assert change in output and output.count("parameter groups") == 1
    assert "self_attn" not in output


@pytest.mark.full
def test_the_steps_after_a_checkpoint_are_the_same(run, judge):
    code, output = judge(run, start=4, layers=False)
    assert code == 0 and "equal: 2 steps" in output
    with pytest.raises(UserError, match="no layer outputs of steps 5 to 6"):
        judge(run, start=4)
    with pytest.raises(UserError, match="has no step 7"):
        judge(run, start=6, layers=False)


@pytest.mark.full
def test_compiled_layers_give_the_same_as_eager_ones(run, judge):
    counters = torch._dynamo.utils.counters["frames"]
    counters.clear()
    code, output = judge(run, layers=False, overrides=("model.compile=regional",))
    assert code == 0 and "equal: 3 steps" in output, output
    assert counters["ok"] > 0, "layers were compiled"


@pytest.mark.full
@pytest.mark.parametrize("size", [1, 2, 8])
def test_other_microbatches_of_bf16_differ_by_rounding_alone(bf16_run, judge, size):
    code, output = judge(bf16_run, overrides=(f"train.microbatch_size={size}",))
    assert code == 0, output


@pytest.mark.full
@pytest.mark.parametrize("plant", [plant_rope, plant_dropout])
def test_a_regression_is_found_in_bf16_too(bf16_run, judge, monkeypatch, plant):
    plant(monkeypatch)
    code, output = judge(bf16_run)
    assert code == 1 and "output of model.layers.0: " in output


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("strategy", "processes", "start"),
    [
        ("ddp", 2, 4),
        ("fsdp2", 4, None),
        ("zero3", 2, None),
        ("zero3", 2, 4),
        ("tensor_parallel", 2, None),
        ("tensor_parallel", 2, 4),
    ],
)
def test_more_processes_of_another_strategy_give_the_same(run, strategy, processes, start):
    words = [
        "-m",
        "finetune",
        "verify",
        "replay",
        str(run),
        *(["--layers"] if start is None else ["--from", str(start)]),
    ]
    done = capture(accelerate_command(strategy, *words, processes=processes), timeout_seconds=300.0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"now: {strategy.replace('tensor_parallel', 'tp')} on {processes} processes" in done.stdout
    assert f"equal: {2 if start else 5} steps" in done.stdout
    assert start or "outputs of 4 of 4 modules compared at step 1" in done.stdout


@pytest.mark.full
def test_a_damaged_record_is_compared_as_far_as_it_goes(run, judge, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    lines = (moved / "events.jsonl").read_text().splitlines()
    steps = [number for number, line in enumerate(lines) if '"StepTaken"' in line]
    lines[steps[1]] = lines[steps[1]][:40]  # step 2
    (moved / "events.jsonl").write_text("\n".join(lines[: steps[3]]) + "\n" + lines[steps[3]][:60])
    (moved / "environment.json").write_text("[1]")
    shutil.rmtree(moved / "checkpoints")
    code, output = judge(moved)
    assert code == 0, output
    assert "equal: 2 steps" in output and "\n   3 " in output and "\n   2 " not in output
    assert "the packages of the run are not known" in output


STEP = {
    "samples_sha256": "aa",
    "num_tokens": 10,
    "num_targets": 4,
    "loss": 2.0,
    "gradient_norm": 1.0,
    "learning_rate": 1e-3,
    "layers": {},
}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"loss": 2.00001}, []),
        ({"loss": 2.001}, ["loss 2 in the record, 2.001 now"]),
        ({"loss": "nan"}, ["loss 2 in the record, nan now"]),
        ({"gradient_norm": 1.01}, ["gradient norm 1 in"]),
        ({"learning_rate": 1.000001e-3}, ["learning rate 0.001 in"]),
        ({"samples_sha256": "bb", "num_tokens": 11, "loss": 9.0}, ["other samples (10 tokens in the record, 11 now"]),
    ],
)
def test_each_difference_of_a_step_is_named(changes, named):
    found = list(step_differences(STEP, {**STEP, **changes}, TOLERANCES["fp32"]))
    assert [line.startswith(start) for line, start in zip(found, named, strict=True)] == [True] * len(named)


def test_a_step_that_overflowed_in_both_is_the_same():
    overflowed = {**STEP, "gradient_norm": "inf"}
    assert list(step_differences(overflowed, overflowed, TOLERANCES["fp32"])) == []


def test_layers_that_count_padding_are_not_compared():
    recorded = {"encoder": {"norm": 1.0, "projected_norm": 1.0, "positions": 8}}
    now = {"encoder": {"norm": 2.0, "projected_norm": 2.0, "positions": 9}}
    tolerance = ReplayTolerance(1e-5, 1e-4, 1e-5)
    assert list(replay.layer_differences(recorded, now, tolerance)) == []
    now["encoder"]["positions"] = 8
    assert len(list(replay.layer_differences(recorded, now, tolerance))) == 1
