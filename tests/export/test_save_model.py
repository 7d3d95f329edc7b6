import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from finetune.config.sections.model import LoraSection
from finetune.errors import TrainingError
from finetune.model.adapters.build import add_adapter
from finetune.model.adapters.context import AdapterContext
from tests.refusals import refused


def logits_of(model, batch):
    with torch.no_grad():
        return model.eval()(input_ids=batch).logits


def values_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_a_model_loaded_by_plain_transformers_gives_the_same_logits(architecture_name, build, export, batch, tmp_path):
    model = build(architecture_name)
    report = export(model)
    loaded, loading = AutoModelForCausalLM.from_pretrained(report.folder, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert torch.equal(logits_of(loaded, batch), logits_of(model, batch))
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == architecture_name.endswith(" tied")
    assert report.num_tensors == len(list(model.parameters()))
    assert report.size_bytes > 4 * model.num_parameters()


def test_tokenizer_template_and_stops_come_along(build, export, tokenizer):
    report = export(build())
    loaded = AutoTokenizer.from_pretrained(report.folder)
    assert loaded("hello <|im_end|>")["input_ids"] == tokenizer("hello <|im_end|>")["input_ids"]
    assert loaded.chat_template == tokenizer.chat_template
    generation = GenerationConfig.from_pretrained(report.folder)
    assert tokenizer.convert_ids_to_tokens(generation.eos_token_id) == ["<|endoftext|>", "<|im_end|>"]
    assert generation.pad_token_id == tokenizer.pad_token_id
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(report.files)


def test_the_values_written_are_those_gathered_and_not_those_left_in_the_model(build, export, batch):
    """After ZeRO-3 or FSDP the model's own parameters are empty, or parts."""
    model = build("qwen3 tied")
    expected, weights = logits_of(model, batch), values_of(model)
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    loaded = AutoModelForCausalLM.from_pretrained(export(model, weights).folder)
    assert torch.equal(logits_of(loaded, batch), expected)


def test_a_class_that_fsdp2_put_in_front_does_not_show(build, export):
    model = build()
    wrapper = type("FSDPModule", (), {"__module__": "torch.distributed.fsdp._fully_shard._fully_shard"})
    model.__class__ = type("FSDPLlamaForCausalLM", (wrapper, type(model)), {})
    config = json.loads((export(model).folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_tied_weight_may_be_given_under_either_name_or_both(build, export, batch, name):
    model = build("qwen3 tied")
    weights = values_of(model)
    shared = weights.pop("model.embed_tokens.weight")
    for given in ({name: shared}, {name: shared, "lm_head.weight": shared.clone()}):
        loaded = AutoModelForCausalLM.from_pretrained(export(model, {**weights, **given}).folder)
        assert torch.equal(logits_of(loaded, batch), logits_of(model, batch))


def test_the_type_in_the_config_is_that_of_the_weights(build, export):
    model = build()
    for dtype, keys in (("float32", {}), ("bfloat16", {"dtype": "bfloat16"})):
        folder = export(model, **keys).folder
        assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            assert {str(file.get_tensor(name).dtype) for name in file.keys()} == {f"torch.{dtype}"}  # noqa: SIM118
    assert json.loads((export(build(dtype="bfloat16")).folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_cache_is_on_again_and_the_trained_model_s_config_is_left_alone(build, export):
    model = build()
    assert json.loads((export(model).folder / "config.json").read_text())["use_cache"] is True
    assert model.config.use_cache is False


def test_large_models_are_cut_into_files(build, tokenizer, export, batch):
    model = build("gpt2 tied")
    model.resize_token_embeddings(20_000)
    report = export(model, max_shard_size="1MB")
    assert len([name for name in report.files if name.endswith(".safetensors")]) > 1
    assert "model.safetensors.index.json" in report.files
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(report.folder), batch), logits_of(model, batch))


def test_a_model_exported_again_replaces_the_older_one_whole(build, export, tmp_path, batch):
    export(build(dtype="bfloat16"))
    (tmp_path / "final" / "leftover").write_text("old")
    model = build()
    export(model)
    assert torch.equal(
        logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "final"), batch), logits_of(model, batch)
    )
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert not (tmp_path / "final" / "leftover").exists()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda weights: weights.pop("model.norm.weight"),
        lambda weights: weights.clear(),
        lambda weights: weights.update({"model.norm.weight": torch.empty(0)}),
        lambda weights: weights.update({"model.norm.weight": torch.ones(16)}),
    ],
)
def test_a_missing_or_ungathered_weight_is_an_error_and_the_older_export_stays(build, export, tmp_path, spoil):
    model = build()
    before = export(model).files
    weights = values_of(model)
    spoil(weights)
    with refused(TrainingError, "model.norm.weight" if weights else "21 of 21 weights"):
        export(model, weights)
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert {str(path.relative_to(tmp_path / "final")) for path in (tmp_path / "final").rglob("*.*")} == set(before)


def test_tied_weights_that_have_parted_are_an_error(build, export):
    model = build("qwen3 tied")
    weights = values_of(model)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    with refused(TrainingError, "lm_head.weight"):
        export(model, weights)


def test_a_file_that_came_out_short_is_found(build, export, monkeypatch, tmp_path):
    def write_short(skeleton, folder, *, state_dict, **_):
        save_file(dict(list(state_dict.items())[1:]), folder / "model.safetensors")

    model = build()
    monkeypatch.setattr(type(model), "save_pretrained", write_short)
    with refused(TrainingError, "26,912", "35,232", varies=True):
        export(model)
    assert list(tmp_path.iterdir()) == []


SAMPLING = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1, "max_length": 4096}
END, NEW, OTHER = 0, 2, 17
"""A token that ends a text, the one that ends an answer of the chat template, and one that is text."""


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"eos_token_id": [END, 1, 3], "do_sample": True}, {"eos_token_id": [END, 1, 3, NEW], "do_sample": True}),
        ({"eos_token_id": [3, NEW]}, {"eos_token_id": [3, NEW, END]}),  # as Llama 2: temperature without do_sample
        ({"eos_token_id": OTHER}, {"eos_token_id": [END, NEW]}),  # of another tokenizer
        ({"eos_token_id": None, "bos_token_id": 1}, {"eos_token_id": [END, NEW], "bos_token_id": 1}),
        ({"eos_token_id": END, "pad_token_id": OTHER}, {"eos_token_id": [END, NEW], "pad_token_id": 3}),
    ],
)
@pytest.mark.parametrize("is_adapter", [False, True])
def test_an_export_keeps_the_generation_config_and_adds_the_ends_of_answers(
    build, export, tokenizer, is_adapter, values, expected
):
    model = build()
    model.generation_config = GenerationConfig(**SAMPLING, **values)
    if is_adapter:
        model = add_adapter(model, LoraSection(rank=2), AdapterContext(seed=1))
        model.get_base_model().name_or_path = "org/base"
    written = json.loads((export(model).folder / "generation_config.json").read_text())
    assert tokenizer.convert_ids_to_tokens([END, NEW]) == ["<|endoftext|>", "<|im_end|>"]
    assert {key: written.get(key) for key in {**SAMPLING, **expected}} == {**SAMPLING, **expected}
