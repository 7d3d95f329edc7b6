"""`check --model` refuses, before any weight is read, what a run would refuse once it has loaded them."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from finetune.commands.plan.plan import PlanOptions, plan
from finetune.config.load import load_config
from finetune.errors import ConfigError, ModelError, StrategyError
from finetune.registry.accelerate_files import SHIPPED
from finetune.run.setup.model_checks import MODEL_CHECKS, CheckedJob, Stage, check_model
from finetune.run.setup.strategy import strategy_of_file
from tests.refusals import refused

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
JOB = """\
run: {folder: run}
model: {name: ./base}
data: {train: {path: rows.jsonl, format: text}, max_length: 16}
task: {name: pretrain}
train: {global_batch_size: 8, microbatch_size: 1, steps: 4, learning_rate: 1e-3}
"""
REFUSED = {
    "model.peft={type: loha, values: {r: 4, nonsense: 1}}": ("model.peft.values", "`nonsense`"),
    "model.lora={target_modules: ['layers.0..*q_proj']}": ("model.lora.target_modules", "`layers.0..*q_proj`"),
    "model.lora={target_modules: [q_proj], layers: [0, 7]}": ("model.lora.layers", "7"),
    "model.lora={rank_pattern: {qproj: 2}}": ("model.lora.rank_pattern", "`qproj`"),
    "model.peft={type: ia3, values: {target_modules: [key]}}": ("model.peft.values.target_modules", "`key`"),
    "model.peft={type: oft, values: {oft_block_size: 7, target_modules: all-linear}}": (
        "model.peft.values.oft_block_size",
        "7",
    ),
    "model.freeze=[model.embedtokens.*]": ("model.freeze", "`model.embedtokens.*`"),
    "model.freeze=['*']": ("model.freeze", "every parameter"),
    "model.train_only=[head.*]": ("model.train_only", "`head.*`"),
    "model.batch_norm=frozen": ("model.batch_norm", "no batch norm"),
    "train.optimizer.rates={head.*: 2.0}": ("train.optimizer.rates", "`head.*`"),
    "train.unfreeze=[{patterns: [head.*], after_steps: 1}]": ("train.unfreeze", "`head.*`"),
    "model.new_tokens={tokens: [one]}": ("model.new_tokens.tokens", "`one`"),
    "model.tokenizer={name: ./nowhere}": ("model.tokenizer.name", "nowhere"),
}
READY = (
    "model.lora={init: pissa}",
    "model.lora={dora: true, modules_to_save: [lm_head]}",
    "model={name: ./base, lora: {rank: 2}, new_tokens: {tokens: [three]}}",
    "model.new_tokens={special: [three]}",
    "model.peft={type: prompt_tuning, values: {num_virtual_tokens: 2, prompt_tuning_init_text: one two}}",
    "model.peft={type: prefix_tuning, values: {num_virtual_tokens: 2}}",
    "model.peft={type: loha, values: {r: 2, target_modules: [q_proj]}}",
    "model.freeze=['model.embed_tokens.*']",
    "train.optimizer.rates={lm_head.*: 2.0}",
    "model={from_config: {model_type: llama, values: {num_hidden_layers: 1}}, tokenizer: {train: {}}, "
    "peft: {type: prompt_tuning, values: {num_virtual_tokens: 2}}}",
)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(folder / "base")
    words = Tokenizer(WordLevel({"<pad>": 0, "one": 1, "two": 2}, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>").save_pretrained(
        folder / "base"
    )
    (folder / "base" / "model.safetensors").unlink()  # whoever reads weights fails
    (folder / "rows.jsonl").write_text('{"text": "one"}\n')
    (folder / "job.yaml").write_text(JOB)
    return folder / "job.yaml"


@pytest.mark.parametrize("written", REFUSED)
def test_a_key_about_modules_that_the_model_lacks_is_refused(job, written):
    key, value = REFUSED[written]
    with pytest.raises((ModelError, ConfigError)) as error:
        check_model(CheckedJob(load_config(job, [written])))
    assert key in str(error.value)
    assert value in str(error.value)


@pytest.mark.parametrize("written", READY)
def test_a_job_that_can_be_trained_is_ready(job, written):
    assert check_model(CheckedJob(load_config(job, [written]))) == ()


def test_frozen_weights_that_are_halved_by_default_are_logged(job):
    settings = ["model={name: ./base, lora: {rank: 2}}", "train.precision=bf16"]
    (line,) = check_model(CheckedJob(load_config(job, settings)))
    assert line.startswith("model.dtype: auto: ") and "bfloat16" in line
    for dtype in ("bfloat16", "float32"):
        assert check_model(CheckedJob(load_config(job, [*settings, f"model.dtype={dtype}"]))) == ()


def test_an_accelerate_file_adds_the_checks_of_its_strategy(job):
    loaded = load_config(job, ["model={name: ./base, lora: {rank: 2}, new_tokens: {tokens: [three]}}"])
    zero2, zero3 = (strategy_of_file(loaded, SHIPPED / f"{name}.yaml", num_processes=2) for name in ("zero2", "zero3"))
    assert (zero2.name, zero2.expected.num_processes) == ("zero2", 2)
    check_model(CheckedJob(loaded, zero2))
    with refused(StrategyError, "model.new_tokens", "model.lora"):
        check_model(CheckedJob(loaded, zero3))


def test_a_tied_weight_with_an_adapter_is_refused_under_fsdp_before_weights_are_read(job):
    values = "values: {tie_word_embeddings: true}"
    model = f"model={{from_config: {{model_type: llama, {values}}}, tokenizer: {{name: ./base}}, lora: "
    loaded = load_config(job, [model + "{target_modules: [lm_head]}}"])
    fsdp2 = strategy_of_file(loaded, SHIPPED / "fsdp2.yaml", num_processes=2)
    with pytest.raises((StrategyError, ModelError), match=r"lm_head"):
        check_model(CheckedJob(loaded, fsdp2))


def test_each_check_has_its_place_and_the_config_is_tried_before_what_reads_it():
    stages = [check.stage for check in MODEL_CHECKS]
    assert stages == sorted(stages, key=list(Stage).index)
    assert set(stages) == set(Stage)


def test_a_plan_refuses_the_values_of_a_config_that_no_run_could_build(job):
    values = "{hidden_size: 16, num_attention_heads: 3, num_hidden_layers: 1}"
    written = f"model={{from_config: {{model_type: llama, values: {values}}}, tokenizer: {{name: ./base}}}}"
    with pytest.raises((ModelError, ConfigError), match=r"model\.from_config"):
        plan(job, [written], PlanOptions(gpus="1xH100-80GB"), as_json=True)
