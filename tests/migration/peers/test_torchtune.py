import pytest

from tests.migration.conftest import fate_of, job_of

LORA = """
# tune run --nproc_per_node 4 lora_finetune_distributed --config mine
name: mine
output_dir: /tmp/${name}
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: [q_proj, v_proj, output_proj]
  apply_lora_to_mlp: True
  lora_rank: 64
  lora_alpha: 128
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: /nowhere/Meta-Llama-3.1-8B-Instruct/original/tokenizer.model
  max_seq_len: 2048
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /nowhere/Meta-Llama-3.1-8B-Instruct/
  checkpoint_files: [a.safetensors, b.safetensors]
  output_dir: ${output_dir}
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  packed: True
  split: train[:95%]
batch_size: 2
gradient_accumulation_steps: 8
epochs: 2
max_steps_per_epoch: 50
optimizer:
  _component_: torch.optim.AdamW
  fused: True
  lr: 3e-4
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 10
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
clip_grad_norm: null
dtype: bf16
enable_activation_checkpointing: True
profiler:
  _component_: torchtune.training.setup_torch_profiler
  enabled: False
"""


def test_a_lora_recipe_becomes_a_job_that_checks(migrate):
    migration = migrate(LORA)
    job = job_of(migration)
    assert migration.title == "torchtune" and migration.draft.strategy == "fsdp2"
    assert job["run"]["folder"] == "/tmp/mine"
    assert job["model"]["name"] == "meta-llama/Meta-Llama-3.1-8B-Instruct"
    names = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert job["model"]["lora"] == {"rank": 64, "alpha": 128.0, "target_modules": names}
    assert job["train"]["global_batch_size"] == 2 * 8 * 4
    assert job["data"]["batching"] == {"by": "packs"} and job["data"]["over_length"] == "truncate"
    assert migration.draft.keys_of("not_possible") == migration.draft.keys_of("unknown") == []


def test_defaults_that_differ_are_written_with_their_reason(migrate):
    job = migrate(LORA).job
    assert "max_gradient_norm: null  # torchtune does not clip gradients" in job
    assert "weight_decay: 0.01  # the default of torch 2.13.0, AdamW: optimizer.weight_decay: 0.01" in job
    origin = "torchtune 0.6.1, alpaca_cleaned_dataset: dataset.train_on_input: true"
    assert f"train_on: all  # the default of {origin}" in job
    assert "prompts are targets in torchtune, too, by default of alpaca_cleaned_dataset" in job


def test_steps_per_epoch_are_steps_of_the_whole_run(migrate):
    migration = migrate(LORA)
    assert job_of(migration)["train"]["steps"] == 100
    assert "stops after 50 steps and starts over" in " ".join(migration.job.replace("#", "").split())
    epochs = migrate(LORA.replace("max_steps_per_epoch: 50", "max_steps_per_epoch: null"))
    assert job_of(epochs)["train"]["epochs"] == 2


def test_a_preference_recipe_is_a_preference_task(migrate):
    text = LORA.replace("torchtune.modules.loss.LinearCrossEntropyLoss", "torchtune.rlhf.loss.DPOLoss\n  beta: 0.2")
    text = text.replace("alpaca_cleaned_dataset", "stack_exchange_paired_dataset").replace("  packed: True\n", "")
    job = job_of(migrate(text))
    assert job["task"] == {"name": "preference", "preference": {"loss": "sigmoid", "beta": 0.2}}
    assert job["data"]["train"]["columns"]["chosen"] == "response_j"


@pytest.mark.parametrize(
    ("folder", "builder", "name", "template"),
    [
        ("/nowhere/Llama-2-7b-hf", "llama2.llama2_7b", "meta-llama/Llama-2-7b-hf", "mistral"),
        ("/nowhere/Qwen3-8B", "qwen3.qwen3_8b", "Qwen/Qwen3-8B", None),
        ("/nowhere/gemma-2-9b/", "gemma2.gemma2_9b", "google/gemma-2-9b", "gemma"),
    ],
)
def test_models_are_named_as_on_the_hub_and_base_models_get_a_template(migrate, folder, builder, name, template):
    text = LORA.replace("/nowhere/Meta-Llama-3.1-8B-Instruct/\n", f"{folder}\n")
    text = text.replace("llama3_1.lora_llama3_1_8b", builder)
    job = job_of(migrate(text))
    assert (job["model"]["name"], job["data"].get("chat_template")) == (name, template)


def test_parts_of_a_model_that_stay_frozen_are_named(migrate):
    migration = migrate(LORA.replace("  lora_rank: 64\n", "  lora_rank: 64\n  decoder_trainable: frozen\n"))
    assert fate_of(migration, "model.decoder_trainable")[0] == "not_possible"


def test_quantization_aware_training_is_out_of_scope(migrate):
    migration = migrate(
        LORA + "quantizer:\n  _component_: torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer\n"
    )
    assert migration.draft.out_of_scope == "QAT"


def test_an_unknown_dataset_builder_is_named(migrate):
    migration = migrate(LORA.replace("torchtune.datasets.alpaca_cleaned_dataset", "mine.rows"))
    fate, text = fate_of(migration, "dataset._component_")
    assert fate == "not_possible" and "write `data.train`" in text


def test_a_folder_whose_name_no_file_system_takes_is_a_name(migrate):
    migration = migrate(LORA.replace("/nowhere/Meta-Llama-3.1-8B-Instruct/", "x" * 5000))
    assert f"name: meta-llama/{'x' * 5000}" in migration.job
