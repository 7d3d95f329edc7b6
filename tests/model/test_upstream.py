"""The workarounds work, and are still needed."""

import inspect
from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import fsdp_utils
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from finetune.model.upstream import (
    CHECKED,
    adapters_disabled,
    allow_missing_embeddings,
    head_as_one_unit,
    input_embeddings,
    keep_own_no_split_modules,
    output_embeddings,
    patched,
    unify_tied_embeddings,
)


def test_an_image_model_has_no_embeddings_and_reports_it():
    model = ResNetForImageClassification(ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1]))
    assert input_embeddings(model) is None
    assert output_embeddings(model) is None
    allow_missing_embeddings(model)
    assert model.get_input_embeddings() is None  # what Accelerate's FSDP2 asks


SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def test_the_head_that_shares_the_bias_replaces_its_decoder_in_the_context():
    model = BertForMaskedLM(BertConfig(vocab_size=30, **SIZES))
    decoder = model.get_output_embeddings()
    with head_as_one_unit(model):
        assert model.get_output_embeddings() is model.cls.predictions
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.get_output_embeddings() is decoder
    assert not hasattr(model.cls.predictions, "weight")


def t5(**values):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=30, **sizes, **values))


def bart(**values):
    sizes = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    config = BartConfig(vocab_size=30, d_model=16, encoder_layers=1, decoder_layers=1, **sizes, **values)
    return BartForConditionalGeneration(config)


@pytest.mark.parametrize("build", [t5, bart, lambda: bart(scale_embedding=True)])
def test_encoder_and_decoder_read_the_one_table_and_answer_as_before(build):
    torch.manual_seed(0)
    model = build().eval()
    ids = torch.tensor([[5, 6, 7]])
    given = {"input_ids": ids, "decoder_input_ids": ids}
    before, saved = model(**given).logits, set(model.state_dict())
    unify_tied_embeddings(model)
    assert model.get_encoder().embed_tokens is model.get_decoder().embed_tokens is model.get_input_embeddings()
    assert torch.equal(model(**given).logits, before)
    assert set(model.state_dict()) == saved


def test_embedding_modules_with_different_weights_are_not_unified():
    model = t5(tie_word_embeddings=True)
    own = torch.nn.Embedding(30, 16)
    model.encoder.embed_tokens = own
    unify_tied_embeddings(model)
    assert model.encoder.embed_tokens is own


def test_a_layer_that_contains_the_embeddings_may_be_split():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForMaskedLM(BertConfig(vocab_size=30, **sizes))
    assert "BertEmbeddings" in model._no_split_modules
    keep_own_no_split_modules(model)
    assert set(model._no_split_modules) == {"BertLayer"}


# Each of these fails when the fault is gone: then the workaround and its test can go, too.


def test_the_workarounds_are_checked_for_the_installed_versions():
    for package, newest in CHECKED.items():
        if find_spec(package) is not None:
            major, minor = version(package).split(".")[:2]
            assert (int(major), int(minor)) <= newest, f"{package}: check model/upstream.py, then raise CHECKED"


def test_resnet_still_raises_instead_of_returning_no_embeddings():
    model = ResNetForImageClassification(ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1]))
    with pytest.raises(NotImplementedError):
        model.get_input_embeddings()


def test_accelerate_still_makes_the_output_embeddings_a_unit_of_fsdp2():
    source = inspect.getsource(fsdp_utils)
    assert "get_output_embeddings" in source
    model = BertForMaskedLM(BertConfig(vocab_size=30, **SIZES))
    assert model.cls.predictions.bias is model.get_output_embeddings().bias


def test_t5_still_has_one_embedding_module_for_each_stack():
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=9, **sizes))
    assert model.encoder.embed_tokens is not model.decoder.embed_tokens
    assert model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight


def test_accelerate_still_reads_hidden_size_without_asking_for_the_text_config():
    source = inspect.getsource(Accelerator._prepare_deepspeed)
    assert "hidden_size" in source
    assert "get_text_config" not in source


def test_transformers_still_initializes_models_built_from_a_config(monkeypatch):
    calls = []
    monkeypatch.setattr(PreTrainedModel, "initialize_weights", lambda self: calls.append(self))
    AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=5, **SIZES))
    assert calls


def test_peft_still_widens_inputs_that_autocast_narrows_again():
    layer = lora_layer()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer._cast_input_dtype(torch.zeros(1, 4, dtype=torch.bfloat16), torch.float32).dtype == torch.float32


def test_peft_s_own_switch_still_resets_which_adapters_are_trained():
    model = adapted_model()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with model.disable_adapter():
        pass
    assert any(parameter.requires_grad for parameter in model.parameters())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with adapters_disabled(model):
        assert all(layer.disable_adapters for layer in model.modules() if isinstance(layer, LoraLayer))
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_bitsandbytes_still_repacks_without_an_option():
    modules = pytest.importorskip("bitsandbytes").nn.modules
    assert "support_avx512bf16_for_cpu" in inspect.getsource(modules)


def test_a_patch_of_a_missing_attribute_raises_and_undoes_the_others():
    with pytest.raises(KeyError), patched([(nn.Linear, "reset_parameters", None), (nn.Linear, "no_such_name", None)]):
        raise AssertionError
    assert nn.Linear.reset_parameters is not None


def adapted_model():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=5, **SIZES))
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))


def lora_layer():
    return next(module for module in adapted_model().modules() if isinstance(module, LoraLayer))
