"""A merged model is a plain one whose logits are the adapter's, whatever the adapter is and wherever it stands."""

import copy
import json

import pytest
import torch
from peft import (
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PromptTuningConfig,
    TrainableTokensConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from finetune.errors import ModelError, TrainingError
from finetune.export import merge as merging
from finetune.export.merge import merge
from tests.refusals import refused

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
]

EVERY = {"target_modules": "all-linear"}
KINDS = {
    "LoRA": LoraConfig(r=4, **EVERY),
    "rsLoRA": LoraConfig(r=4, use_rslora=True, **EVERY),
    "DoRA": LoraConfig(r=4, use_dora=True, **EVERY),
    "PiSSA": LoraConfig(r=4, init_lora_weights="pissa", **EVERY),
    "a whole head beside it": LoraConfig(r=4, modules_to_save=["lm_head"], **EVERY),
    "an adapted head": LoraConfig(r=4, target_modules=["lm_head"]),
    "new rows beside it": LoraConfig(r=4, trainable_token_indices=[5, 9], **EVERY),
}
ON_LLAMA = {
    "adapted embeddings": LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]),
    "ranks by name": LoraConfig(r=4, rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 7.0}, **EVERY),
    "IA3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "OFT": OFTConfig(r=0, oft_block_size=8, **EVERY),
    "OFT by Cayley": OFTConfig(r=0, oft_block_size=8, use_cayley_neumann=False, **EVERY),
    "LoHa": LoHaConfig(r=4, target_modules=["q_proj"]),
    "LoKr": LoKrConfig(r=4, target_modules=["q_proj"]),
    "rows alone": TrainableTokensConfig(token_indices=[5, 9]),
}
PARTING = ("a whole head beside it", "an adapted head", "adapted embeddings")
"""What makes two weights of tied embeddings and head."""


def adapted(model, config):
    """Return the model with adapters that do something, as after training."""
    made = get_peft_model(model, copy.deepcopy(config))  # peft writes into it
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return made.eval()


def logits_of(model, **inputs):
    with torch.no_grad():
        return model.eval()(**inputs).logits


def check(model, folder, auto, **inputs):
    """Load what was written with transformers alone and compare."""
    loaded, loading = auto.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    assert not any("lora" in name or "base_layer" in name for name, _ in loaded.named_parameters())
    assert not list(folder.glob("adapter*")) and not (folder / "base").exists()
    assert torch.allclose(logits_of(loaded, **inputs), logits_of(model, **inputs), atol=1e-5)
    with model.disable_adapter():
        assert not torch.allclose(logits_of(loaded, **inputs), logits_of(model, **inputs), atol=1e-4)
    return loaded


PAIRS = [(name, kind) for name in ("llama untied", "qwen3 tied") for kind in (*KINDS, *ON_LLAMA)]


@pytest.mark.parametrize(("architecture_name", "kind"), [*PAIRS, *(("gpt2 tied", kind) for kind in KINDS)])
def test_the_logits_are_the_adapter_s(architecture_name, build, export, batch, kind):
    model = adapted(build(architecture_name), (KINDS | ON_LLAMA)[kind])
    loaded = check(model, export(model, merge=True).folder, AutoModelForCausalLM, input_ids=batch)
    is_tied = architecture_name.endswith(" tied") and kind not in PARTING
    assert loaded.config.tie_word_embeddings is is_tied
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) is is_tied


@pytest.mark.parametrize("config", [KINDS["new rows beside it"], KINDS["a whole head beside it"]], ids=["rows", "head"])
def test_a_resized_vocabulary_stays_resized(build, export, batch, config):
    base = build("qwen3 tied")
    base.resize_token_embeddings(264, mean_resizing=False)
    if config.trainable_token_indices:
        config = LoraConfig(r=4, trainable_token_indices=[260, 261, 262, 263], **EVERY)
    model = adapted(base, config)
    batch[0, -4:] = torch.arange(260, 264)
    loaded = check(model, export(model, merge=True).folder, AutoModelForCausalLM, input_ids=batch)
    assert loaded.config.vocab_size == 264


def test_a_head_of_classes_that_was_trained_whole_is_the_model_s_own(export, batch):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=260, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    model = adapted(BertForSequenceClassification(config), LoraConfig(r=2, task_type="SEQ_CLS", **EVERY))
    check(model, export(model, merge=True).folder, AutoModelForSequenceClassification, input_ids=batch)


def test_convolutions_and_their_statistics_come_along(export):
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)
    plain = ResNetForImageClassification(config)
    plain.train()(pixel_values=torch.rand(4, 3, 32, 32) + 1)  # statistics that are not the first ones
    lora = LoraConfig(r=2, target_modules=["convolution"], modules_to_save=["classifier"])
    model = adapted(plain, lora)
    weights = {name: each.detach().clone() for name, each in model.state_dict().items()}
    folder = export(model, weights, merge=True).folder
    check(model, folder, AutoModelForImageClassification, pixel_values=torch.rand(2, 3, 32, 32))


def test_an_encoder_and_a_decoder_stay_tied(export, batch):
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 1, "num_heads": 4}
    plain = T5ForConditionalGeneration(T5Config(vocab_size=260, decoder_start_token_id=0, **sizes))
    model = adapted(plain, LoraConfig(r=2, task_type="SEQ_2_SEQ_LM", target_modules=["q", "v"]))
    inputs = {"input_ids": batch, "decoder_input_ids": batch[:, :5]}
    loaded = check(model, export(model, merge=True).folder, AutoModelForSeq2SeqLM, **inputs)
    assert loaded.encoder.embed_tokens.weight is loaded.shared.weight


def test_the_sum_is_rounded_once(build):
    """A base in bfloat16 is added to in 64 bits: neither its type nor the adapter's rounds in between."""
    model = adapted(build("llama untied", dtype="bfloat16"), LoraConfig(r=4, target_modules=["q_proj"]))
    name = "model.layers.0.self_attn.q_proj"
    layer = model.get_base_model().get_submodule(name)
    a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
    exact = layer.base_layer.weight.double() + b @ a * layer.scaling["default"]
    weights = {name: each.detach().clone() for name, each in model.named_parameters()}
    for dtype in (torch.float32, torch.bfloat16):
        got = merge(model, weights, dtype=dtype).weights[f"{name}.weight"]
        assert got.dtype == dtype
        assert torch.equal(got, exact.to(dtype))
    assert merge(model, weights, dtype=None).weights[f"{name}.weight"].dtype == torch.bfloat16


def test_the_base_may_come_from_elsewhere_under_its_own_names(build, batch):
    model = adapted(build("qwen3 tied"), LoraConfig(r=4, modules_to_save=["lm_head"], **EVERY))
    given = {name: each.detach() for name, each in model.named_parameters()}
    adapter = {name: each for name, each in given.items() if "lora" in name or "modules_to_save" in name}
    base = {name: each.detach() for name, each in build("qwen3 tied").named_parameters()}
    wanted, got = merge(model, given, dtype=None).weights, merge(model, adapter | base, dtype=None).weights
    assert wanted.keys() == got.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_a_merged_model_is_cut_into_files_and_written_in_the_type_asked_for(build, export, batch):
    base = build("gpt2 tied")
    base.resize_token_embeddings(20_000)
    model = adapted(base, KINDS["LoRA"])
    report = export(model, merge=True, dtype="bfloat16", max_shard_size="1MB")
    files = sorted(report.folder.glob("*.safetensors"))
    assert len(files) > 1
    assert {each.dtype for path in files for each in load_file(path).values()} == {torch.bfloat16}
    assert json.loads((report.folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_adapter_that_cannot_be_merged_is_rejected_with_the_reason(build, export, tmp_path):
    prompts = get_peft_model(build(), PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    with refused(ModelError):
        export(prompts, merge=True)
    vera = get_peft_model(build(), VeraConfig(r=4, target_modules=["q_proj"]))
    with refused(ModelError, "VERA"):
        export(vera, merge=True)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_ungathered_or_broken_value_is_an_error(build, export, tmp_path):
    model = adapted(build(), KINDS["LoRA"])
    weights = {name: each.detach().clone() for name, each in model.named_parameters()}
    factor = next(name for name in weights if "lora_B" in name)
    for value in (torch.empty(0), torch.full_like(weights[factor], torch.nan)):
        with refused(TrainingError, factor.rpartition(".lora_B")[0].rpartition(".")[2]):
            export(model, {**weights, factor: value}, merge=True)
    del weights[factor]
    with refused(TrainingError, "lora_B.default.weight"):
        export(model, weights, merge=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["LoRA", "DoRA", "new rows beside it"])
def test_threads_merge_the_same_bits_in_the_same_order(build, kind, monkeypatch):
    model = adapted(build("llama untied"), KINDS[kind])
    weights = dict(model.named_parameters())
    found = []
    for number in (1, 4):
        monkeypatch.setattr(merging, "num_threads_for", lambda item_bytes, number=number: number)
        found.append(merge(model, weights, dtype=torch.bfloat16).weights)
    assert list(found[0]) == list(found[1])
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
