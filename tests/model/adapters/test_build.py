import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from finetune.config.sections.model import LoraSection, PeftSection
from finetune.errors import ModelError
from finetune.model.adapters.build import add_adapter
from finetune.model.adapters.context import AdapterContext
from finetune.model.loading.pretrained import adapter_digest, base_mismatch_warning
from finetune.model.size import measure_model
from tests.refusals import refused


def peft(kind, **values):
    return PeftSection(type=kind, values=values)


BATCH = torch.arange(24).reshape(2, 12)
KINDS = {
    "lora": LoraSection(rank=2, rslora=True, modules_to_save=("lm_head",)),
    "dora": LoraSection(rank=2, dora=True),
    "ia3": peft("ia3", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "oft": peft("oft", oft_block_size=8, target_modules="all-linear"),
    "prompt": peft("prompt_tuning", num_virtual_tokens=3),
}


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=BATCH, attention_mask=torch.ones_like(BATCH)).logits


@pytest.fixture
def saved(from_config, build, adapted, tmp_path):
    """Return a function that saves an adapter with random values by plain peft, and returns its logits."""

    def save(kind: str):
        made = adapted(build(from_config()), KINDS[kind], noise=0.1)
        made.save_pretrained(tmp_path / "first")
        return logits_of(made)

    return save


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_adapter_keeps_its_weights_and_gets_gradients(from_config, build, adapted, saved, tmp_path, kind):
    expected = saved(kind)
    made = adapted(build(from_config()), tmp_path / "first")
    assert torch.allclose(logits_of(made), expected, atol=1e-6)
    learning = [parameter for parameter in made.parameters() if parameter.requires_grad]
    made(input_ids=BATCH, attention_mask=torch.ones_like(BATCH), labels=BATCH).loss.backward()
    assert learning
    assert all(each.grad is not None for each in learning)


def test_an_adapter_of_another_model_is_refused(from_config, build, adapted, saved, tmp_path):
    saved("dora")
    folder = tmp_path / "first"
    with refused(ModelError, "model.adapter: ", "model.layers", "c_attn", varies=True):
        adapted(build(from_config("gpt2 tied")), folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in tensors if "lora_A" in name)
    save_file({**tensors, name: torch.zeros(2, 16)}, folder / "adapter_model.safetensors")
    with refused(ModelError, "(2, 16)", "(2, 64)"):
        adapted(build(from_config()), folder)
    save_file({name: tensors[name]}, folder / "adapter_model.safetensors")
    with refused(ModelError, "41 tensors"):
        adapted(build(from_config()), folder)


def test_a_folder_without_an_adapter_is_rejected(from_config, build, adapted, tmp_path):
    with refused(ModelError, tmp_path, "adapter_config.json"):
        adapted(build(from_config()), tmp_path)
    with refused(ModelError, "adapter_model.safetensors"):
        adapter_digest(str(tmp_path))


def test_an_adapter_of_another_base_is_warned_about_or_rejected(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/one"}))
    assert base_mismatch_warning(str(tmp_path), name="org/one") is None
    assert "Are they the same weights?" in base_mismatch_warning(str(tmp_path), name="./copy-of-one")
    with refused(ModelError, "`org/one`", "model.name", "`org/other`"):
        base_mismatch_warning(str(tmp_path), name="org/other")


def test_the_initial_adapter_is_identified_by_its_content(saved, tmp_path):
    assert adapter_digest(None) is None
    saved("ia3")
    digest = adapter_digest(str(tmp_path / "first"))
    saved("ia3")
    assert adapter_digest(str(tmp_path / "first")) == digest
    saved("oft")
    assert adapter_digest(str(tmp_path / "first")) != digest


MASK = torch.ones_like(BATCH)
IA3 = peft("ia3", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])
IN_THE_MODEL = {
    "gaussian": LoraSection(rank=2, init="gaussian"),
    "pissa": LoraSection(rank=2, init="pissa"),
    "olora": LoraSection(rank=2, init="olora", alpha=3.0),
    "ia3": IA3,
    "oft": peft("oft", oft_block_size=8, target_modules="all-linear"),
}
BEFORE_THE_TEXT = {
    "prompt": peft("prompt_tuning", num_virtual_tokens=3),
    "prefix": peft("prefix_tuning", num_virtual_tokens=3),
}


def trained(model):
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in ("llama untied", "qwen3 tied") for kind in IN_THE_MODEL] + [("gpt2 tied", "pissa")],
)
def test_new_adapters_do_not_change_the_output_and_all_get_gradients(from_config, build, adapted, name, kind):
    model = build(from_config(name)).eval()
    with torch.no_grad():
        expected = model(input_ids=BATCH).logits
    made = adapted(model, IN_THE_MODEL[kind])
    output = made(input_ids=BATCH, labels=BATCH)
    assert torch.allclose(output.logits, expected, atol=1e-5)
    output.loss.backward()
    learning = trained(made)
    assert learning
    assert all(each.grad is not None and each.dtype == torch.float32 for each in learning.values())
    assert measure_model(made).num_adapted_modules > 0


@pytest.mark.parametrize("kind", BEFORE_THE_TEXT)
@pytest.mark.parametrize("name", ["llama untied", "qwen3 tied", "gpt2 tied"])
def test_only_the_prompt_embeddings_of_prompt_tuning_get_gradients(from_config, build, adapted, kind, name):
    made = adapted(build(from_config(name)), BEFORE_THE_TEXT[kind])
    made(input_ids=BATCH, attention_mask=MASK, labels=BATCH).loss.backward()
    assert list(trained(made)) == ["prompt_encoder.default.embedding.weight"]
    assert made.get_parameter("prompt_encoder.default.embedding.weight").grad.any()


@pytest.mark.parametrize("kind", [*IN_THE_MODEL, *BEFORE_THE_TEXT])
def test_initial_adapter_values_do_not_depend_on_the_random_state(from_config, build, adapted, kind):
    made = []
    for state in (1, 2):
        torch.manual_seed(state)
        made.append(adapted(build(from_config()), {**IN_THE_MODEL, **BEFORE_THE_TEXT}[kind]))
        assert torch.initial_seed() == state
    one, other = (model.state_dict() for model in made)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_trained_prompt_embeddings_are_initialized_from_the_repeated_text(from_config, build, adapted):
    made = adapted(
        build(from_config()),
        peft("prompt_tuning", num_virtual_tokens=5, prompt_tuning_init_text="ab"),
    )
    embeddings = made.get_base_model().get_input_embeddings().weight
    assert torch.equal(made.prompt_encoder["default"].embedding.weight, embeddings[[97, 98, 97, 98, 97]])


def test_pissa_takes_the_largest_parts_out_of_the_base(from_config, build, adapted):
    original = build(from_config()).model.layers[0].mlp.up_proj.weight
    layer = adapted(build(from_config()), LoraSection(rank=2, init="pissa")).get_submodule(
        "base_model.model.model.layers.0.mlp.up_proj"
    )
    largest = torch.linalg.svdvals(original)
    assert torch.allclose(torch.linalg.svdvals(layer.base_layer.weight)[0], largest[2], atol=1e-5)
    assert torch.allclose(layer.base_layer.weight + layer.get_delta_weight("default"), original, atol=1e-5)


REFUSED = [
    ("gpt2 tied", peft("oft", target_modules="all-linear")),
    ("gpt2 tied", LoraSection(init="olora")),
    ("llama untied", peft("oft", oft_block_size=24, target_modules="all-linear")),
    ("llama untied", peft("ia3", target_modules=["k_prj"])),
    ("llama untied", LoraSection(target_modules=("q_proj", "v_prj"))),
    ("llama untied", LoraSection(modules_to_save=("head",))),
    ("llama untied", LoraSection(target_modules=("mlp",))),
    ("llama untied", LoraSection(layers=(1, 2))),
    ("llama untied", LoraSection(rank_pattern={"q_prj": 2})),
]


@pytest.mark.parametrize(("name", "wish"), REFUSED, ids=range(len(REFUSED)))
def test_an_adapter_that_the_model_does_not_support_is_rejected(from_config, build, adapted, name, wish):
    with refused(ModelError):
        adapted(build(from_config(name)), wish)


@pytest.mark.parametrize("wish", BEFORE_THE_TEXT.values(), ids=list(BEFORE_THE_TEXT))
def test_a_head_that_reads_one_position_gets_no_padding_before_its_text(from_config, build, wish):
    with refused(ModelError, "`token_classification`"):
        add_adapter(build(from_config()), wish, AdapterContext(seed=1, head="token_classification", tokenizer=[]))


T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "vocab_size": 40, "decoder_start_token_id": 0}


@pytest.mark.parametrize(
    ("num_decoder_layers", "layers", "adapted_blocks"),
    [
        (2, (0,), {"encoder.block.0", "decoder.block.0"}),
        (2, (0, 2), None),
        (2, (1, 9), None),
        (4, (1, 3), {"encoder.block.1", "decoder.block.1", "decoder.block.3"}),
    ],
)
@pytest.mark.parametrize("target_modules", [("q", "wi"), "all-linear"])
def test_layers_are_those_of_encoder_and_decoder_and_no_other_numbers(
    num_decoder_layers, layers, adapted_blocks, target_modules
):
    """The feed-forward part of a block of T5 is `block.0.layer.2`."""
    model = AutoModelForSeq2SeqLM.from_config(
        AutoConfig.for_model("t5", **T5, num_layers=2, num_decoder_layers=num_decoder_layers)
    )
    section = LoraSection(rank=2, layers=layers, target_modules=target_modules)
    if adapted_blocks is None:
        with refused(ModelError, "model.lora.layers: ", f"layer {layers[-1]}.", "`encoder.block` 2, `decoder"):
            add_adapter(model, section, AdapterContext(seed=1, head="seq2seq_lm"))
        return
    made = add_adapter(model, section, AdapterContext(seed=1, head="seq2seq_lm"))
    names = {name.removeprefix("base_model.model.") for name in trained(made)}
    assert {".".join(name.split(".")[:3]) for name in names} == adapted_blocks
    assert any(".DenseReluDense.wi." in name for name in names)


def test_layers_and_patterns_choose_modules_and_ranks(from_config, build, adapted):
    wish = LoraSection(rank=4, layers=(1,), rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 1.0})
    made = adapted(build(from_config()), wish)
    assert measure_model(made).num_adapted_modules == 7
    assert all(".layers.1." in name for name in trained(made))
    attention = made.get_submodule("base_model.model.model.layers.1.self_attn")
    assert (attention.q_proj.r["default"], attention.k_proj.r["default"]) == (2, 4)
    assert attention.v_proj.scaling["default"] == 0.25
