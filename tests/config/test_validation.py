import pytest

from tests.refusals import pinned

WRONG = [
    "train.learning_rate='1e-4'",
    "train.steps=1e3",
    "train.steps=true",
    "data.shuffle=yes",
    "task.name=pretraining",
    "run.strategy=fsdp",
    "run.strategy=fsdp1",
    "model.revision=1.0",
    "model.freeze=wte.*",
    "model.lora={target_modules: 3}",
    "model.lora=16",
    "train=16",
    "train.optimizer.betas=[0.9]",
    "train.schedule={warmup_fraction: 2}",
    "checkpoint.keep_last=1",
    "checkpoint.resume=3",
    "export.max_shard_size=5 GB",
    "data.train.columns={prompt: -3}",
    "evaluate=true",
]

UNKNOWN = [
    "train.learningrate=1",
    "data.microbatch_size=1",
    "model.max_length=1",
    "model.lora={bias: all}",
    "train.per_device_train_batch_size=1",
    "train.bf16=true",
    "report.wandb_api_key=x",
    "deepspeed=x.json",
]


@pytest.mark.parametrize("written", WRONG)
def test_an_invalid_value_is_reported_with_the_value_and_the_allowed_ones(complaints, written):
    (said,) = complaints(written)
    pinned(said)


@pytest.mark.parametrize("written", UNKNOWN)
def test_an_unknown_key_is_reported_with_the_most_similar_one(complaints, written):
    (said,) = complaints(written)
    pinned(said)


def test_a_missing_key_is_reported_with_its_meaning(job, complaints):
    text = job.read_text().replace("  learning_rate: 1e-4\n", "")
    (said,) = complaints(text=text)
    pinned(said, "train.learning_rate: ")


def test_the_tag_of_a_union_is_not_taken_for_a_key(complaints):
    (said,) = complaints("model.lora={target_modules: [q_proj, 3]}")
    assert "model.lora.target_modules" in said
    assert "tuple" not in said
    assert "literal" not in said
