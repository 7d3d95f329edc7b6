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


OFT = """
stage: sft
model_name_or_path: org/model
finetuning_type: oft
oft_block_size: 16
oft_target: q_proj,v_proj
module_dropout: 0.1
dataset: org/rows
template: llama3
output_dir: saves/x
"""


def test_llama_factory_trains_oft_as_a_type_of_peft(migrate):
    values = {"oft_block_size": 16, "target_modules": ["q_proj", "v_proj"], "module_dropout": 0.1}
    migration = migrate(OFT)
    assert job_of(migration)["model"]["peft"] == {"type": "oft", "values": values}
    assert fate_of(migration, "oft_target") == ("mapped", "model.peft")
    migration = migrate(OFT.replace("finetuning_type: oft", "finetuning_type: lora"))
    assert "peft" not in job_of(migration)["model"]
    assert fate_of(migration, "oft_target") == ("not_needed", "no OFT is trained in LLaMA-Factory")


def test_llama_factory_names_are_looked_up_in_its_dataset_info(migrate, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.json").write_text('[{"q": "a", "a": "b"}]')
    info = {"mine": {"file_name": "mine.json"}, "other": {"hf_hub_url": "org/other", "subset": "en"}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    migration = migrate(LLAMA_FACTORY)
    mine, other = job_of(migration)["data"]["train"]["mix"]
    assert mine["path"] == str(tmp_path / "data" / "mine.json") and mine["take"] == 500
    assert (other["name"], other["config"]) == ("org/other", "en")
    assert migration.draft.strategy == "zero2" and migration.draft.keys_of("not_possible") == []


@pytest.mark.parametrize("strategy", ["concat", "interleave_under"])
def test_all_rows_of_several_datasets_are_mixed(migrate, strategy):
    migration = migrate(f"{LLAMA_FACTORY}mix_strategy: {strategy}\n")
    assert [source["epochs"] for source in job_of(migration)["data"]["train"]["mix"]] == [1, 1]
    assert fate_of(migration, "mix_strategy")[0] == ("not_needed" if strategy == "concat" else "not_possible")


def test_packs_whose_samples_see_each_other_are_noted(migrate):
    migration = migrate(LLAMA_FACTORY)
    assert "samples in a pack see each other in LLaMA-Factory without `neat_packing`" in migration.job
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


GKD = """
model_name_or_path: org/student
teacher_model_name_or_path: org/teacher
datasets: [{path: json, data_files: rows.jsonl}]
temperature: 0.9
use_peft: true
lora_r: 8
"""


def test_gkd_samples_from_the_student_unless_lmbda_is_0(migrate):
    migration = migrate(GKD)
    job = job_of(migration)
    assert job["task"]["distillation"] == {"teacher": "org/teacher", "divergence": "jsd"}  # at temperature 1.0
    assert fate_of(migration, "temperature")[0] == "not_needed"
    notes = " ".join(migration.job.replace("#", "").split())
    assert "in 50% of the steps in TRL (trl 1.16.0, GKDConfig: lmbda: 0.5" in notes
    assert job["train"]["learning_rate"] == 2e-5 and job["data"]["train_on"] == "last_assistant"
    off = migrate(GKD + "lmbda: 0.0\n")
    assert "of the steps in TRL" not in off.job and fate_of(off, "lmbda")[0] == "not_needed"
    written = migrate(GKD + "lmbda: 1.0\n")
    assert fate_of(written, "lmbda")[0] == "not_possible"


def test_data_files_of_a_builder_are_the_file(migrate, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    assert job_of(migrate(GKD))["data"]["train"] == {"path": str(tmp_path / "rows.jsonl")}
    hub = migrate(GKD.replace("path: json", "path: org/rows"))
    assert job_of(hub)["data"]["train"] == {"path": "hf://datasets/org/rows/rows.jsonl"}


def test_use_peft_alone_decides_whether_adapters_are_trained(migrate):
    migration = migrate(GKD)
    lora = job_of(migration)["model"]["lora"]
    assert lora == {"rank": 8, "target_modules": ["q_proj", "v_proj"], "dropout": 0.05}
    assert fate_of(migration, "use_peft") == ("mapped", "the section `model.lora`")
    full = migrate(GKD.replace("use_peft: true\n", ""))
    assert "lora" not in job_of(full)["model"]  # `lora_r` has no effect without `use_peft`
    assert fate_of(full, "lora_r")[0] == "not_needed"


def test_kto_keeps_the_order_of_the_rows_by_default(migrate):
    text = "model_name_or_path: org/a\ndataset_name: org/rows\ndesirable_weight: 1.5\n"
    assert job_of(migrate(text))["data"]["shuffle"] is False
    assert "shuffle" not in job_of(migrate(text + "train_sampling_strategy: random\n"))["data"]


def test_simpo_of_trl_has_a_cross_entropy_term_by_default(migrate):
    text = "model_name_or_path: org/a\ndataset_name: org/rows\nsimpo_gamma: 0.7\nloss_type: simpo\n"
    expected = {"loss": "simpo", "sft_weight": 1.0, "target_margin": 0.7}
    assert job_of(migrate(text))["task"]["preference"] == expected
    assert job_of(migrate(text + "cpo_alpha: 0.0\n"))["task"]["preference"]["sft_weight"] == 0.0


def test_evaluations_by_steps_follow_the_logging_where_their_number_is_unset(migrate):
    text = "model_name_or_path: org/a\ndataset_name: org/rows\neval_strategy: steps\nlogging_steps: 25\n"
    assert job_of(migrate(text))["evaluate"]["every_steps"] == 25


def test_a_file_with_keys_of_two_trainers_is_of_the_one_that_knows_all(migrate):
    assert migrate(GKD).title == "TRL"  # `datasets` is a key of axolotl, too


def test_a_token_that_a_reason_quotes_is_redacted(migrate):
    token = "hf_abcdefghijklmnopqrstuvwxyz0123456789"
    migration = migrate(f"{TRL_DPO}report_to: {token}\n")
    assert fate_of(migration, "report_to")[0] == "not_possible"
    assert "report_to" in migration.job and token not in migration.job
