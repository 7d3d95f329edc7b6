from dataclasses import replace

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    CLIPImageProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from finetune.config.sections.export import ExportSection
from finetune.config.sections.model import ImageProcessorSection
from finetune.data.templates.chat_template import stop_ids
from finetune.export.card import PIPELINES, CardBase, CardFacts, write_card
from finetune.export.save import Preprocessors, TextPreprocessor, export_model
from finetune.model.loading.architecture import HEADS
from finetune.model.processing import build_image_processor

FACTS = CardFacts(
    "gsm8k",
    "sft",
    num_steps=1200,
    metrics={"loss": 0.4567891},
    config_text="run:\n  seed: 42\n",
    software={"torch": "2.13"},
)
BERT = {"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
CLASSES = {"id2label": {0: "bad", 1: "so so", 2: "good"}, "label2id": {"bad": 0, "so so": 1, "good": 2}}


def data_of(card):
    """Return the metadata as the hub's own library reads it."""
    return ModelCard(card).data.to_dict()


def code_of(card):
    return card.split("```python\n")[1].split("```")[0]


def test_the_card_of_a_full_model_describes_it_and_how_to_load_it():
    card = write_card(FACTS, base=None)
    assert data_of(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["finetune", "sft"],
    }
    assert "Trained for 1,200 steps (task `sft`)" in card
    assert "| loss | 0.456789 |" in card
    assert "model = AutoModelForCausalLM.from_pretrained(folder)" in card
    assert "```yaml\nrun:\n  seed: 42\n```" in card
    assert card.endswith("torch 2.13\n")


def test_an_adapter_s_card_names_its_base():
    card = write_card(FACTS, base=CardBase("org/model"))
    assert data_of(card) == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "base_model": "org/model",
        "base_model_relation": "adapter",
        "tags": ["finetune", "sft"],
    }
    assert 'AutoModelForCausalLM.from_pretrained("org/model")' in card
    beside = write_card(FACTS, base=CardBase(None))
    assert "base_model" not in data_of(beside)
    assert "its base is in `base/`" in beside


@pytest.mark.parametrize("was_merged", [True, False])
def test_a_model_that_began_as_another_is_its_fine_tune_merged_or_not(was_merged):
    card = write_card(FACTS, base=CardBase("org/model", "finetune", was_merged=was_merged))
    data = data_of(card)
    assert (data["base_model"], data["base_model_relation"]) == ("org/model", "finetune")
    assert data["library_name"] == "transformers"
    assert ("was merged into its base `org/model`" in card) is was_merged
    assert "peft" not in code_of(card)


def test_a_local_folder_is_not_written_as_base_model_of_the_card():
    for name in ("/home/me/model", "./model", "~/model"):
        assert "base_model" not in data_of(write_card(FACTS, base=CardBase(name)))


def test_no_license_is_made_up():
    for base in (None, CardBase("org/model")):
        assert "license" not in write_card(FACTS, base=base)


def test_unknown_facts_leave_no_empty_heading_in_the_card():
    card = write_card(replace(FACTS, metrics={}, software={}, config_text="", num_steps=0), base=None)
    assert [line for line in card.splitlines() if line.startswith("## ")] == ["## Load", "## Chat"]
    assert "Trained for" not in card


def plain(head, tokenizer, build):
    """Return a small model with the head, and what its inputs are made with."""
    torch.manual_seed(0)
    inputs = Preprocessors(TextPreprocessor(tokenizer, stop_ids(tokenizer)))
    if head == "causal_lm":
        return build(), inputs
    if head == "seq2seq_lm":
        sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 1, "num_heads": 4}
        return T5ForConditionalGeneration(T5Config(vocab_size=260, decoder_start_token_id=0, **sizes)), inputs
    if head == "image_classification":
        config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], **CLASSES)
        return ResNetForImageClassification(config), Preprocessors(
            None, build_image_processor(ImageProcessorSection(size=32))
        )
    if head == "image_text_to_text":
        return llava(tokenizer)
    kinds = {
        "masked_lm": BertForMaskedLM,
        "sequence_classification": BertForSequenceClassification,
        "token_classification": BertForTokenClassification,
        "embedding": BertModel,
    }
    return kinds[head](BertConfig(**BERT, **({} if head == "masked_lm" else CLASSES))), inputs


def llava(tokenizer):
    text = {"model_type": "llama", "vocab_size": 260, "hidden_size": 32, "intermediate_size": 32}
    text |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_id=1))
    size = {"height": 16, "width": 16}
    processor = LlavaProcessor(CLIPImageProcessor(size=size, crop_size=size), tokenizer, patch_size=8)
    return model, Preprocessors(TextPreprocessor(tokenizer, stop_ids(tokenizer)), processor)


@pytest.mark.parametrize("head", list(HEADS))
def test_the_code_of_the_card_loads_the_model(head, tokenizer, build, tmp_path):
    model, inputs = plain(head, tokenizer, build)
    loaded = load(model, inputs, head=head, folder=tmp_path / "final")
    assert type(loaded["model"]) is type(model)
    assert loaded["processor" if "image" in head else "tokenizer"] is not None
    weights = dict(loaded["model"].named_parameters())
    assert all(torch.equal(weights[name], each) for name, each in model.named_parameters())


@pytest.mark.parametrize("head", list(HEADS))
def test_the_code_of_an_adapter_s_card_loads_base_and_adapter(head, tokenizer, build, tmp_path):
    model, inputs = plain(head, tokenizer, build)
    model.save_pretrained(tmp_path / "base-model")
    model.name_or_path = str(tmp_path / "base-model")
    target = "convolution" if head == "image_classification" else "(q|q_proj|query)"
    adapted = get_peft_model(model, LoraConfig(target_modules=f".*{target}", init_lora_weights=False))
    loaded = load(adapted, inputs, head=head, folder=tmp_path / "final")
    assert isinstance(loaded["model"], PeftModel)
    weights = dict(loaded["model"].named_parameters())
    own = dict(adapted.named_parameters())
    assert own.keys() == weights.keys() and any("lora" in name for name in own)
    assert all(torch.equal(weights[name], each) for name, each in own.items())
    if head in ("sequence_classification", "token_classification", "image_classification"):
        assert loaded["model"].config.id2label == CLASSES["id2label"]


def load(model, inputs, *, head, folder):
    """Export the model and run the code of its card, as a reader would; return what it defines."""
    weights = {name: each.detach().clone() for name, each in model.state_dict(keep_vars=True).items()}
    facts = replace(FACTS, head=head, task="some_task")
    export_model(folder, model=model, weights=weights, preprocessors=inputs, section=ExportSection(), facts=facts)
    card = (folder / "README.md").read_text()
    assert data_of(card)["pipeline_tag"] == PIPELINES[head]
    assert data_of(card)["tags"] == ["finetune", "some-task"]
    made = {}
    exec(code_of(card).replace("PATH_OF_THIS_FOLDER", str(folder)), made)
    return made
