import os

import pytest
import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

from finetune.config.sections.model import ModelSection
from finetune.errors import ModelError
from finetune.model.attention.implementation import requested_attention
from finetune.model.loading.load import load_model
from finetune.runtime import upstream
from finetune.runtime.parameters import InitContext
from finetune.runtime.processes import free_loopback_port
from tests.refusals import refused

HOLLOW = InitContext(context=lambda: init_empty_weights(include_buffers=False), on_meta_device=True)


def is_tied(model) -> bool:
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_tied_embeddings_are_one_parameter_and_recorded_in_the_config(architecture_name, from_config, build):
    model = build(from_config(architecture_name))
    assert is_tied(model) == architecture_name.endswith(" tied") == model.config.tie_word_embeddings


def test_a_model_on_the_meta_device_has_the_same_parameters_ties_and_buffers(architecture_name, from_config, build):
    full, hollow = build(from_config(architecture_name)), build(from_config(architecture_name), construction=HOLLOW)
    described = {name: (p.shape, p.dtype, p.device) for name, p in full.named_parameters()}
    assert {name: (p.shape, p.dtype, p.device) for name, p in hollow.named_parameters()} == described
    assert is_tied(hollow) == is_tied(full)
    buffers = dict(hollow.named_buffers())
    for name, buffer in full.named_buffers():
        assert torch.equal(buffer, buffers[name])
    assert bool(buffers) != architecture_name.startswith("gpt2")  # rotary frequencies were really looked at


def test_a_model_on_the_meta_device_reads_only_the_config_of_its_folder(tmp_path, from_config, build):
    build(from_config()).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    hollow = build(ModelSection(name=str(tmp_path)), construction=HOLLOW)
    assert hollow.num_parameters() > 0
    with refused(ModelError, "model.name"):
        build(ModelSection(name=str(tmp_path)))


def test_a_rank_without_weights_keeps_the_same_parameters_in_float32(tmp_path):
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 100}
    config = AutoConfig.for_model("t5", **sizes, decoder_start_token_id=0)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path)
    section = ModelSection(name=str(tmp_path), dtype="float16")
    full, hollow = (
        {name: tensor.dtype for name, tensor in model.state_dict().items()}
        for model in (
            load_model(section, head="seq2seq_lm", init_context=context, seed=1, vocabulary_size=None)
            for context in (InitContext(), HOLLOW)
        )
    )
    assert set(full.values()) == {torch.float16, torch.float32}  # T5 overflows in float16 without
    assert hollow == full


def test_a_saved_model_is_loaded_in_the_requested_dtype(tmp_path, from_config, build):
    saved = build(from_config())
    saved.save_pretrained(tmp_path)
    loaded = build(ModelSection(name=str(tmp_path), dtype="bfloat16"))
    assert loaded.dtype == torch.bfloat16
    assert loaded.training
    assert torch.equal(loaded.lm_head.weight, saved.lm_head.weight.to(torch.bfloat16))


def test_weights_without_the_head_are_refused_instead_of_drawn_at_random(tmp_path, from_config, build):
    build(from_config()).model.save_pretrained(tmp_path)
    assert AutoModel.from_pretrained(tmp_path) is not None
    with refused(ModelError, "lm_head.weight"):
        build(ModelSection(name=str(tmp_path)))


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path, from_config, build):
    section = from_config()
    small = build(section)
    small.resize_token_embeddings(200)
    small.save_pretrained(tmp_path)
    with refused(ModelError, "300 tokens", "200"):
        build(ModelSection(name=str(tmp_path)))


def test_training_keeps_no_cache_and_generation_still_does(from_config, build):
    model = build(from_config())
    assert model(input_ids=torch.tensor([[5, 6]])).past_key_values is None
    assert model.generation_config.use_cache is not False


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_flash_attention_without_a_gpu_is_refused_before_anything_is_loaded():
    with refused(ModelError, "model.attention: "):
        requested_attention("flash_attention_2")
    assert requested_attention("auto") is None


def test_a_missing_model_folder_is_named_in_the_error(build):
    with refused(ModelError, "/nowhere"):
        build(ModelSection(name="/nowhere"))


def test_an_adapter_s_folder_is_rejected_as_model_name(tmp_path, build):
    (tmp_path / "adapter_config.json").write_text("{}")
    with refused(ModelError, "model.name: "):
        build(ModelSection(name=str(tmp_path)))


def test_an_unknown_hub_name_without_a_network_is_reported_with_a_remedy(build, monkeypatch, tmp_path):
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    upstream.is_offline.cache_clear()
    with refused(ModelError, "nobody/nothing"):
        build(ModelSection(name="nobody/nothing", cache_folder=str(tmp_path)))
    upstream.is_offline.cache_clear()


def test_a_hub_that_does_not_answer_counts_as_offline(monkeypatch):
    for name in (*upstream.PROXIES, "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_loopback_port()}")
    upstream.is_offline.cache_clear()
    assert upstream.is_offline()
    upstream.is_offline.cache_clear()
