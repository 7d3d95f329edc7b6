import pytest

from tests.migration.conftest import fate_of, job_of

LORA = """
base_model: org/base-1b
load_in_4bit: true
datasets:
  - path: org/rows
    type: alpaca
    split: train[:10%]
val_set_size: 0.1
output_dir: ./out
adapter: qlora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
sequence_len: 1024
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
wandb_project:
special_tokens:
"""


def test_a_qlora_config_becomes_a_job_that_checks(migrate):
    migration = migrate(LORA)
    job = job_of(migration)
    assert job["model"]["quantization"] == {"bits": 4}
    assert job["model"]["lora"] == {"rank": 8, "alpha": 16.0, "target_modules": "all-linear"}
    assert job["data"]["train"]["name"] == "org/rows" and job["data"]["train"]["split"] == "train[:10%]"
    assert "### Instruction:" in job["data"]["train"]["template"]["prompt"]
    assert job["data"]["batching"] == {"by": "packs"} and job["data"]["over_length"] == "drop"
    assert job["data"]["validation"] == {"fraction": 0.1}
    assert job["train"]["global_batch_size"] == 8 and job["train"]["microbatch_size"] == 2
    assert job["train"]["schedule"] == {"name": "cosine", "warmup_fraction": 0.1}
    assert migration.draft.keys_of("not_possible") == migration.draft.keys_of("unknown") == []


def test_each_key_names_the_line_that_it_is_from(migrate):
    job = migrate(LORA).job
    assert "microbatch_size: 2  # from line 16: micro_batch_size: 2\n" in job
    assert "rank: 8  # from line 11: lora_r: 8\n" in job
    assert "# - this is the default here, too: line 26: weight_decay: 0.0\n" in job
    assert "it is unset there, too: line 27: wandb_project: null; line 28: special_tokens: null" in job


def test_alpaca_prompts_stay_plain_text(migrate):
    migration = migrate(LORA)
    assert job_of(migration)["data"]["chat_template"] == "plain"
    with_template = migrate(LORA + "chat_template: llama3\n")
    assert job_of(with_template)["data"]["chat_template"] == "plain"  # axolotl's prompts are text, whatever it says
    assert fate_of(with_template, "chat_template")[0] == "not_needed"


def test_the_batch_grows_with_the_gpus_that_are_given(migrate):
    migration = migrate(LORA, gpus=4)
    assert job_of(migration)["train"]["global_batch_size"] == 32
    assert migration.draft.strategy == "ddp"


@pytest.mark.parametrize(
    ("lines", "strategy"),
    [
        ("", "single"),
        ("deepspeed: deepspeed_configs/zero3.json\n", "zero3"),
        ("deepspeed: deepspeed_configs/zero2_offload.json\n", "zero2_offload"),
        ("fsdp: [full_shard, auto_wrap]\nfsdp_config:\n  fsdp_offload_params: true\n", "fsdp2"),
        ("fsdp_version: 2\nfsdp_config:\n  reshard_after_forward: true\n", "fsdp2"),
        ("context_parallel_size: 2\n", "ddp_sequence_parallel"),
    ],
)
def test_the_strategy_follows_from_the_file(migrate, lines, strategy):
    migration = migrate(LORA + lines)
    job_of(migration)
    assert migration.draft.strategy == strategy
    assert migration.draft.keys_of("not_possible") == []


def test_dpo_rows_keep_their_columns(migrate):
    text = LORA.replace("    type: alpaca\n", "    type: chat_template.default\n    field_messages: talk\n")
    job = job_of(migrate(text.replace("sample_packing: true\n", "") + "rl: dpo\nrl_beta: 0.2\n"))
    assert job["task"] == {"name": "preference", "preference": {"loss": "sigmoid", "beta": 0.2}}
    assert job["data"]["train"]["format"] == "preference"
    assert job["data"]["train"]["columns"] == {"prompt": "talk"}


def test_several_datasets_are_a_mix_of_all_their_rows(migrate):
    text = LORA.replace("datasets:\n", "datasets:\n  - path: org/first\n    type: chat_template\n")
    mix = job_of(migrate(text))["data"]["train"]["mix"]
    assert [source["name"] for source in mix] == ["org/first", "org/rows"]
    assert [source["epochs"] for source in mix] == [1, 1]


def test_system_turns_are_left_out_where_they_are_dropped_there(migrate):
    chat = "    type: chat_template\n    field_messages: talk\n    drop_system_message: true\n"
    source = job_of(migrate(LORA.replace("    type: alpaca\n", chat)))["data"]["train"]
    assert (
        source["format"] == "messages" and "rejectattr('role', 'equalto', 'system')" in source["template"]["messages"]
    )


def test_a_constant_schedule_ignores_its_warmup_as_there(migrate):
    migration = migrate(LORA.replace("lr_scheduler: cosine", "lr_scheduler: constant"))
    assert job_of(migration)["train"]["schedule"] == {"name": "constant"}
    assert fate_of(migration, "warmup_ratio")[0] == "not_needed"
    assert "`constant` ignores the warmup there" in migration.job


def test_an_impossible_key_is_named_with_what_to_do_instead(migrate):
    migration = migrate(LORA + "qat:\n  weight_dtype: int4\nrl: grpo\nnot_a_key: 1\noptimizer_args: x\n")
    job_of(migration)
    assert fate_of(migration, "qat.weight_dtype")[0] == "not_possible"
    assert migration.draft.out_of_scope == "rl: grpo"
    assert migration.draft.keys_of("unknown") == ["not_a_key", "optimizer_args"]
    assert "line 32: not_a_key: 1" in migration.job


def test_a_value_of_another_type_is_named(migrate):
    migration = migrate(LORA.replace("learning_rate: 2e-4", "learning_rate: fast"))
    assert fate_of(migration, "learning_rate") == (
        "not_possible",
        "this is not a number. Correct it and run this again.",
    )
    assert any(problem.key == "train.learning_rate" for problem in migration.problems)


def test_a_plugin_that_chooses_the_loss_kernel_overrides_the_key_of_another(migrate):
    lines = "plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]\n"
    migration = migrate(LORA + lines + "liger_fused_linear_cross_entropy: true\n")
    assert job_of(migration)["train"]["loss_kernel"] == "cce"
    assert fate_of(migration, "plugins") == ("mapped", "train.loss_kernel")
    assert fate_of(migration, "liger_fused_linear_cross_entropy")[0] == "not_possible"
