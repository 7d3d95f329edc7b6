import json

import pytest

from finetune.data.templates.row_template import render_template
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
    assert "it is unset in the file, too: line 27: wandb_project: null; line 28: special_tokens: null" in job


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
    assert "`constant` ignores the warmup" in migration.job


def test_an_impossible_key_is_named_with_what_to_do_instead(migrate):
    migration = migrate(LORA + "qat:\n  weight_dtype: int4\nrl: grpo\nnot_a_key: 1\noptimizer_args: x\n")
    job_of(migration)
    assert fate_of(migration, "qat.weight_dtype")[0] == "not_possible"
    assert migration.draft.out_of_scope == "reinforcement learning"
    assert migration.draft.keys_of("unknown") == ["not_a_key", "optimizer_args"]
    assert "line 32: not_a_key: 1" in migration.job


def test_a_value_of_another_type_is_named(migrate):
    migration = migrate(LORA.replace("learning_rate: 2e-4", "learning_rate: fast"))
    assert fate_of(migration, "learning_rate") == (
        "not_possible",
        "this is not a finite number. Correct it and run this again.",
    )
    assert any(problem.key == "train.learning_rate" for problem in migration.problems)


def test_a_plugin_that_chooses_the_loss_kernel_overrides_the_key_of_another(migrate):
    lines = "plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]\n"
    migration = migrate(LORA + lines + "liger_fused_linear_cross_entropy: true\n")
    assert job_of(migration)["train"]["loss_kernel"] == "cce"
    assert fate_of(migration, "plugins") == ("mapped", "train.loss_kernel")
    assert fate_of(migration, "liger_fused_linear_cross_entropy")[0] == "not_possible"


CHAT = LORA.replace("    type: alpaca\n", "    type: chat_template\n").replace("warmup_ratio: 0.1\n", "")


def rendered(migration, turns):
    """Return the turns that the template of the job's source makes of a row with these turns."""
    template = job_of(migration)["data"]["train"]["template"]["messages"]
    return json.loads(render_template(template, {"messages": turns}, column="messages"))


def test_batch_size_is_the_batch_of_all_gpus(migrate):
    text = CHAT.replace("gradient_accumulation_steps: 4\n", "batch_size: 16\n")
    for gpus in (1, 4):
        train = job_of(migrate(text, gpus=gpus))["train"]
        assert (train["microbatch_size"], train["global_batch_size"]) == (2, 16)


def test_unwritten_keys_become_the_defaults_of_axolotl(migrate):
    migration = migrate("base_model: org/base-1b\ndatasets: [{path: org/rows}]\nlearning_rate: 1e-4\n")
    job = job_of(migration)
    assert job["train"]["schedule"] == {"warmup_fraction": 0.03}  # cosine is our default, too
    assert "the warmup is at most 100 steps in axolotl" in migration.job
    assert job["checkpoint"] == {"every_steps": 500, "keep_last": 4} and "1 times per epoch there" in migration.job
    assert (job["train"]["epochs"], job["train"]["precision"], job["model"]["dtype"]) == (1.0, "bf16", "bfloat16")
    assert (job["data"]["max_length"], job["data"]["over_length"]) == (512, "drop")
    assert (job["train"]["microbatch_size"], job["train"]["global_batch_size"]) == (1, 1)


def test_a_warmup_of_0_steps_is_no_warmup(migrate):
    assert "schedule" not in job_of(migrate(f"{CHAT}warmup_steps: 0\n".replace("lr_scheduler: cosine\n", "")))["train"]


def test_written_saves_replace_those_of_each_epoch(migrate):
    text = CHAT.replace("saves_per_epoch: 1\n", "save_steps: 50\n")
    assert job_of(migrate(text))["checkpoint"] == {"every_steps": 50, "keep_last": 4}


def test_evaluations_start_before_the_first_step_there(migrate):
    job = job_of(migrate(CHAT.replace("evals_per_epoch: 4", "eval_steps: 20")))
    assert job["evaluate"] == {"every_steps": 20, "at_start": True}


def test_a_project_turns_its_tracker_on(migrate):
    job = job_of(migrate(CHAT.replace("wandb_project:\n", "wandb_project: mine\nuse_wandb: false\n")))
    assert job["report"] == {"project": "mine", "trackers": ["wandb"]}


@pytest.mark.parametrize("value", ["all", "last", "none"])
def test_other_ends_of_turns_as_targets_are_not_possible(migrate, value):
    migration = migrate(CHAT.replace("    split:", f"    train_on_eos: {value}\n    split:"))
    assert fate_of(migration, "datasets.0.train_on_eos")[0] == "not_possible"
    usual = migrate(CHAT.replace("    split:", "    train_on_eos: turn\n    split:"))
    assert fate_of(usual, "datasets.0.train_on_eos")[0] == "not_needed"


def test_prompts_as_targets_are_contents_there_and_the_whole_conversation_here(migrate):
    migration = migrate(f"{CHAT}train_on_inputs: true\n")
    assert job_of(migration)["data"]["train_on"] == "all"
    assert "headers that the chat template writes" in " ".join(migration.job.replace("#", " ").split())


@pytest.mark.parametrize(
    ("keys", "weights"),
    [
        ({"roles_to_train": "[]", "message_field_training": "train"}, [0, 0, 0, 1]),
        ({"roles_to_train": "[human, assistant]"}, [0, 1, 1, 1]),
        ({"message_field_training": "train"}, [0, 0, 0, 1]),
    ],
)
def test_turns_that_are_targets_have_a_weight(migrate, keys, weights):
    lines = "".join(f"    {key}: {value}\n" for key, value in keys.items())
    migration = migrate(CHAT.replace("    split:", f"{lines}    field_tools: functions_of_row\n    split:"))
    turns = [("system", "S", None), ("human", "Q", None), ("gpt", "A", False), ("gpt", "B", True)]
    rows = rendered(migration, [{"role": role, "content": text, "train": train} for role, text, train in turns])
    assert job_of(migration)["data"]["train_on"] == "per_message"
    assert job_of(migration)["data"]["train"]["columns"] == {"tools": "functions_of_row"}
    assert [turn["weight"] for turn in rows] == weights
    assert [turn["role"] for turn in rows] == ["system", "user", "assistant", "assistant"]
    assert {fate_of(migration, f"datasets.0.{key}")[0] for key in keys} == {"mapped"}


def test_keys_and_speakers_of_turns_are_renamed(migrate):
    keys = "    message_property_mappings: {role: who, content: text}\n    roles: {assistant: [bot], user: [me]}\n"
    migration = migrate(CHAT.replace("    split:", f"{keys}    split:"))
    turns = [{"who": "me", "text": "Q"}, {"who": "bot", "text": "A", "name": "x"}]
    expected = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A", "name": "x"}]
    assert rendered(migration, turns) == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("message_field_training_detail", "detail"),
        ("split_thinking", "true"),
    ],
)
def test_targets_within_a_turn_are_not_possible(migrate, key, value):
    migration = migrate(CHAT.replace("    split:", f"    {key}: {value}\n    split:"))
    assert fate_of(migration, f"datasets.0.{key}")[0] == "not_possible"


def test_a_local_file_has_no_split(migrate, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    text = CHAT.replace("path: org/rows", "path: rows.jsonl")
    whole = migrate(text.replace("train[:10%]", "train"))
    assert job_of(whole)["data"]["train"] == {"path": str(tmp_path / "rows.jsonl"), "format": "messages"}
    assert job_of(migrate(text.replace("train[:10%]", "train[:50]")))["data"]["train"]["take"] == 50
    part = migrate(text)
    assert "split" not in job_of(part)["data"]["train"]
    assert fate_of(part, "datasets.0.split")[0] == "not_possible"


def test_the_note_on_long_rows_agrees_with_the_job(migrate):
    assert (
        "rows longer than `max_length` are truncated in axolotl"
        in migrate(f"{CHAT}excess_length_strategy: truncate\n").job
    )
    assert "rows longer than" not in migrate(f"{CHAT}excess_length_strategy: raise\n").job


def test_kto_rows_are_judged_answers_and_types_name_columns(migrate):
    text = LORA.replace("type: alpaca", "type: llama3.intel").replace("sample_packing: true\n", "")
    job = job_of(migrate(f"{text}rl: kto\n"))
    assert job["data"]["train"]["format"] == "judged" and job["data"]["train"]["columns"] == {"prompt": "question"}
    assert job["data"]["chat_template"] == "llama3"
    pairs = job_of(migrate(text.replace("llama3.intel", "chat_template.default") + "rl: dpo\n"))
    assert pairs["data"]["train"]["columns"] == {"prompt": "messages"}  # where that type looks for the question


def test_simpo_has_the_cross_entropy_term_of_trl(migrate):
    text = LORA.replace("type: alpaca", "type: chat_template.argilla").replace("sample_packing: true\n", "")
    assert job_of(migrate(f"{text}rl: simpo\n"))["task"]["preference"] == {"loss": "simpo", "sft_weight": 1.0}


def test_the_prompt_of_a_file_is_that_of_its_type(migrate):
    own = LORA.replace("type: alpaca", "type: {field_instruction: q, field_output: a}")
    template = job_of(migrate(own))["data"]["train"]["template"]
    assert render_template(template["prompt"], {"q": "add"}, column="prompt") == "add "  # its default `{instruction} `


def test_plugins_with_a_training_of_their_own_are_not_possible(migrate):
    migration = migrate(f"{LORA}plugins: [axolotl.integrations.kd.KDPlugin]\n")
    assert fate_of(migration, "plugins")[0] == "not_possible"


def test_a_typo_gets_the_nearest_key_of_axolotl(migrate):
    fate, text = fate_of(migrate(f"{LORA}sequence_lenn: 4\n"), "sequence_lenn")
    assert fate == "unknown" and text.endswith("Did you mean `sequence_len`?")
