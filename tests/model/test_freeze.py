"""Patterns of names select the trained parameters."""

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from finetune.config.sections.model import LoraSection
from finetune.errors import ModelError
from finetune.model.adapters.build import add_adapter
from finetune.model.adapters.context import AdapterContext
from finetune.model.layers import freeze, train_only, unused_modules
from finetune.model.upstream import expose_hidden_size, keep_own_no_split_modules
from tests.refusals import refused


class Tied(nn.Module):
    """A model whose embeddings are tied to the head, with a layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.layer = nn.Linear(2, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight


def learning(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


@pytest.mark.parametrize("pattern", ["embed*", "head.*"])
def test_only_matching_parameters_are_trainable_and_a_tied_weight_matches_both_names(pattern):
    model = Tied()
    train_only(model, (pattern,))
    assert learning(model) == ["embed.weight"]


def test_matching_parameters_are_frozen():
    model = Tied()
    assert freeze(model, ("layer.*", "layer.bias")) == ("layer.weight", "layer.bias")
    assert learning(model) == ["embed.weight"]


@pytest.mark.parametrize(("change", "key"), [(freeze, "model.freeze"), (train_only, "model.train_only")])
def test_a_pattern_without_a_match_names_existing_parameters(change, key):
    with refused(ModelError, f"{key}: ", "`layers.*`", "`layer.weight`"):
        change(Tied(), ("layers.*",))


TOWER = "model.vision_tower"
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}


def llava(read):
    config = AutoConfig.for_model(
        "llava",
        text_config={"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 32, **SMALL},
        vision_config={
            "model_type": "clip_vision_model",
            "num_hidden_layers": 3,
            "image_size": 16,
            "patch_size": 8,
            **SMALL,
        },
        vision_feature_layer=read,
        image_token_id=31,
    )
    return AutoModelForImageTextToText.from_config(config)


LAYERS = {-1: [], -2: ["encoder.layers.2"], 1: ["encoder.layers.1", "encoder.layers.2"], (1, -2): ["encoder.layers.2"]}


@pytest.mark.parametrize("read", LAYERS)
def test_layers_after_the_selected_vision_layer_are_unused(read):
    found = unused_modules(llava(list(read) if isinstance(read, tuple) else read))
    assert list(found) == [f"{TOWER}.{name}" for name in (*LAYERS[read], "post_layernorm")]


def test_unused_layers_are_those_without_a_gradient():
    model = llava(-2)
    ids = torch.tensor([[1, 31, 31, 31, 31, 2]])
    model(input_ids=ids, pixel_values=torch.rand(1, 3, 16, 16)).logits.sum().backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    unused = tuple(f"{name}." for name in unused_modules(model))
    assert without == {name for name, _ in model.named_parameters() if name.startswith(unused)}
    assert len(without) > 10


def test_unused_layers_get_no_adapter():
    adapted = add_adapter(llava(-2), LoraSection(rank=2), AdapterContext(seed=1, head="image_text_to_text"))
    names = [name for name, module in adapted.named_modules() if isinstance(module, LoraLayer)]
    assert any(f"{TOWER}.encoder.layers.1" in name for name in names)
    assert not any(f"{TOWER}.encoder.layers.2" in name for name in names)


def test_only_layers_that_a_model_has_are_named_as_whole():
    model = llava(-2)
    assert "CLIPTextEmbeddings" in model._no_split_modules
    keep_own_no_split_modules(model)
    assert {"CLIPEncoderLayer", "LlamaDecoderLayer"} <= set(model._no_split_modules)
    assert "CLIPTextEmbeddings" not in model._no_split_modules


def test_a_composite_config_exposes_its_hidden_size_inside_the_context():
    config = llava(-2).config
    with expose_hidden_size(config):
        assert config.hidden_size == 16
    assert not hasattr(config, "hidden_size")
    assert "hidden_size" not in config.to_dict()
    with expose_hidden_size(config.text_config):
        assert config.text_config.hidden_size == 16
    assert config.text_config.hidden_size == 16
