from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import equal

from finetune.commands.export import export_checkpoint
from finetune.config.load import load_config
from finetune.errors import CheckpointError, StrategyError
from finetune.report.history import read_events
from finetune.run.setup.strategy import (
    launched_strategy,
    require_sliceable_model,
    require_splittable_model,
    require_supported_by_strategy,
)
from finetune.run.train import train_from_config
from tests.refusals import refused
from tests.scenarios.trained import forget

TOKENS = "model.new_tokens={tokens: [quokka]}"
LORA = "model.lora={}"
FOUR, EIGHT = (f"model={{name: org/base, lora: {{}}, quantization: {{bits: {bits}}}}}" for bits in (4, 8))


@pytest.mark.parametrize(
    ("written", "strategy", "fact"),
    [
        ([TOKENS, LORA], "zero3", "model.new_tokens"),
        ([TOKENS, LORA], "fsdp2", "model.new_tokens"),
        ([FOUR], "zero3", "bitsandbytes/issues/1249"),
        ([EIGHT], "fsdp2", "model.quantization"),
    ],
)
def test_a_job_that_a_strategy_does_not_support_is_refused_with_the_reason(job, written, strategy, fact):
    with refused(StrategyError, strategy, fact):
        require_supported_by_strategy(load_config(job, written).config, strategy)


@pytest.mark.parametrize(
    ("written", "strategy"),
    [
        ([TOKENS], "zero3"),
        ([TOKENS], "fsdp2"),
        ([TOKENS, LORA], "zero2"),
        ([FOUR], "fsdp2"),
        ([EIGHT], "ddp"),
        ([LORA], "zero3"),
    ],
)
def test_a_job_that_the_strategy_supports_is_accepted(job, written, strategy):
    require_supported_by_strategy(load_config(job, written).config, strategy)


@pytest.mark.parametrize(
    ("written", "key"),
    [
        (["task.name=reward"], "task.name"),
        (["model.peft={type: ia3}"], "model"),
        (["model.lora={init: pissa}"], "model.lora"),
        ([TOKENS, LORA], "model.lora"),
        (["model.compile=regional"], "model.compile, model.kernels"),
        (["model.kernels=liger"], "model.compile, model.kernels"),
        (["model.gradient_checkpointing=selective"], "model.gradient_checkpointing"),
        (["train.precision=fp8"], "train.precision"),
        (["train.optimizer.name=muon"], "train.optimizer"),
        (["train.optimizer.state_dtype=int8"], "train.optimizer"),
    ],
)
def test_unsupported_jobs_are_refused_under_tensor_parallelism_with_the_reason(job, monkeypatch, written, key):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    assert launched_strategy(load_config(job)).expected.data_parallel_size == 1
    with refused(StrategyError, key, varies=key == "train.precision"):  # of the machine's GPU
        launched_strategy(load_config(job, written))


def test_models_that_ranks_cannot_split_are_refused_with_the_reason(job):
    require_splittable_model(load_config(job).config, size=2)
    for written in (
        "model.from_config.model_type=olmo",
        "model.from_config.values={hidden_size: 48, num_attention_heads: 3, num_key_value_heads: 1}",
    ):
        with refused(StrategyError, "parallelism_config_tp_size: 2: "):
            require_splittable_model(load_config(job, [written]).config, size=2)


def test_all_settings_that_are_not_exact_where_ranks_share_rows_are_refused_at_once(job, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "2")
    assert launched_strategy(load_config(job)).expected.data_parallel_size == 2
    written = ["model.attention=sdpa", "train.embedding_noise=5.0", "model.compile=regional"]
    with refused(StrategyError, "\n  model.attention:", "\n  model.compile:", "\n  train.embedding_noise:"):
        launched_strategy(load_config(job, written))
    with refused(StrategyError, "task.name", "`pretrain`", "`sft`"):
        launched_strategy(load_config(job, ["task.name=reward"]))


@pytest.mark.parametrize(
    "written",
    [
        "data.batching.padding_free=false",
        "model.from_config.model_type=lfm2",
        "model.from_config.values.num_attention_heads=2",
    ],
)
def test_models_and_batches_that_ranks_cannot_share_are_refused(job, written):
    config = load_config(job, [written]).config
    require_sliceable_model(config, size=1)
    with refused(StrategyError, "parallelism_config_sp_size: 4"):
        require_sliceable_model(config, size=4)


@pytest.fixture
def train(trained, job, tmp_path):
    """Return a function that trains on the model of a finished run, in this process, and returns the run's folder."""
    base = trained("full") / "final"

    def run(name: str, *written: str) -> Path:
        quick = ["train.steps=4", "checkpoint.every_steps=2", "evaluate=null", "data.validation=null"]
        model = "model={name: " + str(base) + "}"
        train_from_config(load_config(job, [model, *quick, *written, f"run.folder={tmp_path / name}"]))
        forget()
        return tmp_path / name

    return run


def adapter_in(folder: Path) -> dict:
    return load_file(folder / "adapter_model.safetensors")


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)


KINDS = {
    "pissa": ["model.lora={rank: 4, init: pissa}"],
    "new rows": ["model.lora={rank: 2}", "model.new_tokens={special: ['<|tool|>']}"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_run_resumes_to_the_same_adapter_and_its_checkpoint_exports_it(train, tmp_path, kind):
    written = KINDS[kind]
    straight = train("straight", *written)
    parted = train("parted", *written, "train.stop_after_steps=2")
    assert not (parted / "final").exists()
    assert train("parted", *written) == parted
    taken = [event["step"] for event in read_events(parted / "events.jsonl") if event["event"] == "StepTaken"]
    assert taken == [1, 2, 3, 4]
    assert same(adapter_in(parted / "final"), adapter_in(straight / "final"))
    export_checkpoint(straight, step=None, to=tmp_path / "out", dtype=None)
    assert same(adapter_in(tmp_path / "out"), adapter_in(straight / "final"))


def test_a_run_starts_from_the_adapter_of_another_and_does_not_resume_if_it_changed(train, tmp_path):
    first = train("first", "model.lora={rank: 2}") / "final"
    again = f"model.adapter={first}"
    second = train("second", again, "train.stop_after_steps=2", "train.learning_rate=1e-9")
    export_checkpoint(second, step=None, to=tmp_path / "out", dtype=None)
    exported = adapter_in(tmp_path / "out")
    assert all((exported[name] - tensor).abs().max() < 1e-6 for name, tensor in adapter_in(first).items())
    save_file({name: 2 * tensor for name, tensor in adapter_in(first).items()}, first / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="first adapter cannot be changed"):
        train("second", again, "train.learning_rate=1e-9")
