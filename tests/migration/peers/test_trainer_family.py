"""Trainer's arguments, and TRL and LLaMA-Factory, which share them."""

import json

import pytest

from tests.migration.conftest import fate_of, job_of

TRL_DPO = """
model_name_or_path: org/base-1b-Instruct
dataset_name: org/pairs
learning_rate: 5e-7
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
max_length: 512
loss_type: [sigmoid, sft]
loss_weights: [1.0, 0.5]
beta: 0.2
use_peft: true
lora_r: 8
lora_target_modules: all-linear
eval_strategy: steps
eval_steps: 50
output_dir: out
"""

LLAMA_FACTORY = """
model_name_or_path: org/base-8b
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: mine,other
template: llama3
cutoff_len: 1024
max_samples: 500
output_dir: out
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
packing: true
deepspeed: examples/deepspeed/ds_z2_config.json
"""


def test_trl_dpo_with_an_sft_term(migrate):
    migration = migrate(TRL_DPO)
    job = job_of(migration)
    assert migration.title == "TRL"
    assert job["task"] == {"name": "preference", "preference": {"loss": "sigmoid", "sft_weight": 0.5, "beta": 0.2}}
    assert job["data"]["train"] == {"name": "org/pairs"} and job["data"]["validation"]["split"] == "test"
    assert job["model"]["lora"] == {"rank": 8, "dropout": 0.05}  # all-linear is our default
    assert job["evaluate"] == {"every_steps": 50, "microbatch_size": 8}  # the latter by TrainingArguments
    assert job["train"]["schedule"] == {"name": "linear"} and job["train"]["epochs"] == 3
    assert migration.draft.keys_of("not_possible") == []


@pytest.mark.parametrize("loss", ["exo_pair", "sppo_hard", "no_such_loss"])
def test_a_loss_of_dpo_that_is_not_ours_is_named_with_ours(migrate, loss):
    text = TRL_DPO.replace("[sigmoid, sft]", loss).replace("loss_weights: [1.0, 0.5]\n", "")
    migration = migrate(text)
    fate, message = fate_of(migration, "loss_type")
    assert fate == "not_possible" and "sigmoid, hinge, ipo, robust" in message
    assert job_of(migration)["task"]["preference"]["loss"] == "sigmoid"


def test_trl_sft_on_messages_trains_on_prompts_unless_answers_alone_are_asked_for(migrate):
    text = TRL_DPO.replace("loss_type: [sigmoid, sft]\nloss_weights: [1.0, 0.5]\nbeta: 0.2\n", "packing: true\n")
    assert job_of(migrate(text))["data"]["train_on"] == "all"
    migration = migrate(text + "assistant_only_loss: true\n")
    assert "train_on" not in job_of(migration)["data"] or job_of(migration)["data"]["train_on"] == "assistant"


def test_online_reinforcement_learning_is_out_of_scope(migrate):
    migration = migrate(TRL_DPO.replace("beta: 0.2\n", "num_generations: 8\n"))
    assert migration.draft.out_of_scope == "reinforcement learning"
    assert fate_of(migration, "num_generations")[0] == "not_possible"


def test_llama_factory_names_are_looked_up_in_its_dataset_info(migrate, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.json").write_text('[{"q": "a", "a": "b"}]')
    info = {
        "mine": {"file_name": "mine.json", "columns": {"prompt": "q", "response": "a"}},
        "other": {"hf_hub_url": "org/other", "formatting": "sharegpt", "columns": {"messages": "talk"}},
    }
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    migration = migrate(LLAMA_FACTORY)
    mine, other = job_of(migration)["data"]["train"]["mix"]
    assert mine["path"] == str(tmp_path / "data" / "mine.json") and mine["take"] == 500
    assert mine["columns"] == {"prompt": "q", "completion": "a"}
    assert (other["name"], other["format"], other["columns"]) == (
        "org/other",
        "conversations",
        {"conversations": "talk"},
    )
    assert migration.draft.strategy == "zero2" and migration.draft.keys_of("not_possible") == []


def test_packs_whose_samples_see_each_other_are_noted(migrate):
    migration = migrate(LLAMA_FACTORY)
    assert "samples in a pack see each other there without `neat_packing`" in migration.job
    assert job_of(migration)["data"]["chat_template"] == "llama3"
    assert job_of(migration)["model"]["lora"] == {"rank": 8, "alpha": 16.0, "target_modules": "all-linear"}


def test_arguments_that_trainer_writes_are_all_known(migrate):
    transformers = pytest.importorskip("transformers")
    text = transformers.TrainingArguments(output_dir="out", learning_rate=3e-5, report_to="none").to_json_string()
    migration = migrate(text, name="training_args.json")
    assert migration.title == "transformers' Trainer"
    assert len(migration.draft.file.leaves) > 80
    assert migration.draft.keys_of("unknown") == migration.draft.keys_of("not_possible") == []
    assert job_of(migration)["train"]["learning_rate"] == 3e-5
    assert job_of(migration)["train"]["schedule"]["name"] == "linear"
    assert "write their names in place of MODEL and DATASET" in migration.job


@pytest.mark.parametrize(
    ("name", "task"),
    [("SFTConfig", "sft"), ("DPOConfig", "preference"), ("KTOConfig", "preference"), ("RewardConfig", "reward")],
)
def test_arguments_that_trl_writes_are_all_known(migrate, name, task):
    trl = pytest.importorskip("trl")
    text = getattr(trl, name)(output_dir="out", report_to="none", bf16=False).to_json_string()
    migration = migrate(text, name=f"{name}.json")
    assert migration.title == "TRL"
    assert migration.draft.keys_of("unknown") == migration.draft.keys_of("not_possible") == []
    assert job_of(migration)["task"]["name"] == task
