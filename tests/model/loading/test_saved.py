"""A model folder is inspected before it is loaded: its head, base, number of classes and size of the vocabulary."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from finetune.errors import ModelError
from finetune.model.loading.saved import attach_adapters, inspect_model_folder, load_saved_base, load_saved_model
from tests.refusals import refused

LLAMA = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
IDS = torch.arange(4, 28).reshape(2, 12)


def logits_of(model, ids=IDS):
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


@pytest.fixture
def llama(tmp_path):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def adapted(model, folder, **keys):
    """Save a trained adapter by peft alone, and return the model with it."""
    made = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, **keys))
    made.save_pretrained(folder)
    return made


def test_the_head_is_that_of_the_class_that_was_saved(tmp_path, llama):
    small = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 40}
    models = {
        "seq2seq_lm": T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **small)),
        "sequence_classification": BertForSequenceClassification(BertConfig(**BERT)),
        "image_classification": ResNetForImageClassification(
            ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])
        ),
    }
    for head, model in models.items():
        model.save_pretrained(tmp_path / head)
        assert inspect_model_folder(tmp_path / head, key="k").head == head
    assert inspect_model_folder(llama, key="k").head == "causal_lm"
    assert [inspect_model_folder(tmp_path / head, key="k").can_generate for head in models] == [True, False, False]


def test_final_is_found_in_a_run_s_folder(tmp_path, llama):
    (tmp_path / "run").mkdir()
    llama.rename(tmp_path / "run" / "final")
    assert inspect_model_folder(tmp_path / "run", key="k").folder == tmp_path / "run" / "final"


def test_an_adapter_is_loaded_on_the_base_it_names(tmp_path, llama):
    made = adapted(LlamaForCausalLM.from_pretrained(llama), tmp_path / "adapter", task_type="CAUSAL_LM")
    saved = inspect_model_folder(tmp_path / "adapter", key="k")
    assert (saved.base, saved.head) == (str(llama), "causal_lm")
    assert torch.equal(logits_of(load_saved_model(saved, key="k")), logits_of(made))


def test_a_base_in_the_adapter_folder_takes_precedence_over_the_named_one(tmp_path, llama):
    adapted(LlamaForCausalLM.from_pretrained(llama), tmp_path / "adapter")
    shutil.copytree(llama, tmp_path / "adapter" / "base")
    assert inspect_model_folder(tmp_path / "adapter", key="k").base == str(tmp_path / "adapter" / "base")


@pytest.mark.parametrize(
    "keys", [{"trainable_token_indices": [40, 41]}, {"modules_to_save": ["embed_tokens", "lm_head"]}]
)
def test_embedding_rows_that_the_base_lacks_are_loaded_from_the_adapter(tmp_path, llama, keys):
    base = LlamaForCausalLM.from_pretrained(llama)
    base.resize_token_embeddings(42, mean_resizing=False)
    made = adapted(base, tmp_path / "adapter", **keys)
    ids = IDS.clone()
    ids[0, -2:] = torch.tensor([40, 41])
    loaded = load_saved_model(inspect_model_folder(tmp_path / "adapter", key="k"), key="k")
    assert loaded.get_input_embeddings().weight.shape[0] == 42
    expected, got = logits_of(made, ids), logits_of(loaded, ids)
    if "trainable_token_indices" in keys:  # what the head says of tokens that nobody has trained is left to chance
        expected, got = expected[..., :40], got[..., :40]
    assert torch.allclose(got, expected, atol=1e-6)


def test_classes_that_the_base_lacks_are_counted_in_the_adapter(tmp_path):
    torch.manual_seed(0)
    BertModel(BertConfig(**BERT)).save_pretrained(tmp_path / "bert")
    base = BertForSequenceClassification.from_pretrained(tmp_path / "bert", num_labels=3)
    made = adapted(base, tmp_path / "adapter", task_type="SEQ_CLS")
    saved = inspect_model_folder(tmp_path / "adapter", key="k")
    assert saved.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert torch.equal(logits_of(load_saved_model(saved, key="k")), logits_of(made))
    named = BertConfig(**BERT, id2label={0: "bad", 1: "so so", 2: "good"})
    named.save_pretrained(tmp_path / "adapter" / "config")
    assert inspect_model_folder(tmp_path / "adapter", key="k").labels == ("bad", "so so", "good")


def test_several_adapters_share_one_base(tmp_path, llama):
    for name in ("one", "two"):
        adapted(LlamaForCausalLM.from_pretrained(llama), tmp_path / name, task_type="CAUSAL_LM")
    base = load_saved_base(inspect_model_folder(llama, key="k"), key="k")
    alone = logits_of(base)
    model = attach_adapters(base, {name: tmp_path / name for name in ("one", "two")}, key="k")
    first = logits_of(model)
    model.set_adapter("two")
    second = logits_of(model)
    assert not torch.allclose(first, second) and not torch.allclose(first, alone)
    with model.disable_adapter():
        assert torch.equal(logits_of(model), alone)


def test_a_folder_that_is_not_a_model_is_rejected(tmp_path, llama):
    with refused(ModelError, tmp_path / "nothing"):
        inspect_model_folder(tmp_path / "nothing", key="chat")
    with refused(ModelError, tmp_path):
        inspect_model_folder(tmp_path, key="chat")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with refused(ModelError, "chat: ", tmp_path):
        inspect_model_folder(tmp_path, key="chat")
    with refused(ModelError, "--adapter", "adapter_config.json"):
        attach_adapters(load_saved_base(inspect_model_folder(llama, key="k"), key="k"), {"one": llama}, key="--adapter")
