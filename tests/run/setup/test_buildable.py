"""Values of a model's config that give no model are told with their line before any row is read."""

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

from finetune.config.load import load_config
from finetune.errors import ConfigError
from finetune.run.setup.model_problems import require_buildable
from tests.refusals import refused

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
JOB = """\
run: {folder: run}
model:
  name: ./base
  config:
    attention_dropout: 0.1
    CHANGE
data: {train: {path: rows.jsonl}, max_length: 16}
task: {name: sft}
train: {global_batch_size: 1, microbatch_size: 1, steps: 1, learning_rate: 1e-3}
"""
WRONG = {
    "atention_dropout: 0.2": "`attention_dropout`?",
    "num_hidden_layers: 2": "",
    "rope_scaling: {rope_type: yarn}": "'factor'",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("job")
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(made / "base")
    (made / "rows.jsonl").write_text("{}\n")
    return made


@pytest.mark.parametrize("change", WRONG)
def test_a_problem_found_by_building_the_model_is_reported_with_its_line(folder, change):
    (folder / "job.yaml").write_text(JOB.replace("CHANGE", change))
    with refused(ConfigError, f"line 6, model.config.{change.partition(':')[0]}: ", WRONG[change]):
        require_buildable(load_config(folder / "job.yaml"))


def test_a_valid_rope_scaling_is_built(folder):
    (folder / "job.yaml").write_text(JOB.replace("CHANGE", "rope_scaling: {rope_type: yarn, factor: 2.0}"))
    require_buildable(load_config(folder / "job.yaml"))


def test_an_invalid_value_of_a_new_model_is_reported_with_its_line(folder):
    text = JOB.replace("name: ./base\n  config:", "tokenizer: {train: {}}\n  from_config: {model_type: llama, values:")
    values = "{attention_dropout: 0.1, hiden_size: 8}}"
    text = text.replace(" values:\n    attention_dropout: 0.1\n    CHANGE", f" values: {values}")
    (folder / "job.yaml").write_text(text)
    with refused(ConfigError, "line 4, model.from_config.values.hiden_size: ", "`hidden_size`?"):
        require_buildable(load_config(folder / "job.yaml"))
