"""Samples of more tokens than the model has positions: refused or told with the key, before any row is read."""

import pytest
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig

from finetune.config.load import load_config
from finetune.errors import ConfigError
from finetune.run.setup.model_problems import require_model_positions
from tests.refusals import pinned, refused

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
BASES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, max_position_embeddings=64),
    "gpt2": GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=64, bos_token_id=1, eos_token_id=2),
}
JOB = """\
run: {folder: run}
model:
  name: ./NAME
  CHANGE
data:
  train: {path: rows.jsonl}
  max_length: LENGTH
task: {name: sft}
train: {global_batch_size: 4, microbatch_size: 4, steps: 1, learning_rate: 1e-3}
"""
YARN = "rope_scaling: {rope_type: yarn, factor: 4.0}"
DYNAMIC = "config: {rope_scaling: {rope_type: dynamic, factor: 4.0}}"
LONGROPE = (
    "config: {rope_scaling: {rope_type: longrope, factor: 4.0, short_factor: [1.0, 1.0, 1.0, 1.0], "
    "long_factor: [4.0, 4.0, 4.0, 4.0]}, max_position_embeddings: 256}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("job")
    for name, config in BASES.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(made / name)
    (made / "rows.jsonl").write_text("{}\n")
    return made


def checked(folder, name, change, length, *overrides):
    text = JOB.replace("NAME", name).replace("CHANGE", change or "dtype: float32").replace("LENGTH", str(length))
    (folder / "job.yaml").write_text(text)
    return require_model_positions(load_config(folder / "job.yaml", overrides))


@pytest.mark.parametrize(
    ("name", "change", "length"),
    [
        ("llama", "", 64),
        ("llama", YARN, 256),
        ("llama", f"config: {{{YARN}}}", 256),
        ("llama", DYNAMIC, 64),
        ("llama", LONGROPE, 64),
        ("gpt2", "", 64),
    ],
)
def test_lengths_within_the_positions_of_the_model_give_no_warning(folder, name, change, length):
    assert checked(folder, name, change, length) is None


@pytest.mark.parametrize(("change", "length", "positions"), [("", 100, 64), (YARN, 257, 256)])
def test_lengths_beyond_the_positions_of_the_model_are_warned_about_with_the_setting_to_write(
    folder, change, length, positions
):
    warning = checked(folder, "llama", change, length)
    pinned(warning, f"data.max_length is {length}", f"{positions} positions", "`model.rope_scaling`")


@pytest.mark.parametrize(
    ("name", "change", "fact"),
    [
        ("gpt2", "", "64 positions"),
        ("llama", DYNAMIC, "`rope_type: dynamic`"),
        ("llama", LONGROPE, "`data.batching.by: samples`"),
    ],
)
def test_lengths_that_fail_or_depend_on_the_batch_are_rejected_with_their_line(folder, name, change, fact):
    with refused(ConfigError, "line 7, data.max_length: ", "64", fact):
        checked(folder, name, change, 65)


def test_longrope_is_exact_where_each_sample_is_alone(folder):
    alone = ("train.microbatch_size=1",)
    assert checked(folder, "llama", LONGROPE, 200, *alone) is None
    for others in (
        ("data.batching.by=packs",),
        ("evaluate={every_steps: 1, microbatch_size: 2}", "data.validation={fraction: 0.5}"),
    ):
        with refused(ConfigError, "line 7, data.max_length: "):
            checked(folder, "llama", LONGROPE, 200, *alone, *others)
    with refused(ConfigError, "line 7, data.max_length: "):
        checked(folder, "llama", DYNAMIC, 200, *alone)
