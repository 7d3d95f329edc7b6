"""Routers are found in every architecture as transformers records them; a call shows what they compute."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.errors import ModelError
from finetune.task.router_loss.routers import expert_probabilities, find_routers
from tests.task.router_loss.mixtures import SIGMOID, SOFTMAX, mixture


def on_meta(model_type, **values):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))


@pytest.mark.parametrize("model_type", [*SOFTMAX, *SIGMOID])
def test_every_layer_with_experts_has_one_router_whose_scores_are_known(model_type):
    values = {**SOFTMAX, **SIGMOID}[model_type]
    routers = find_routers(on_meta(model_type, vocab_size=64, **values))
    dense = values.get("first_k_dense_replace", values.get("num_dense_layers", len(values.get("mlp_only_layers", ()))))
    assert len(routers) == values["num_hidden_layers"] - dense
    wanted = "softmax" if model_type in SOFTMAX else "sigmoid"
    assert {(each.num_experts, each.top_k, each.score_function) for each in routers} == {(8, 2, wanted)}


def test_a_dense_model_has_none():
    assert find_routers(on_meta("llama", num_hidden_layers=1)) == ()


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("phimoe", "PhimoeTopKRouter are neither a softmax nor a sigmoid"),
        ("llama4_text", "Llama4Router does not return logits, weights and indices"),
    ],
)
def test_routers_that_choose_in_another_way_are_refused(model_type, why):
    with pytest.raises(ModelError, match=why):
        find_routers(on_meta(model_type, num_hidden_layers=1))


@pytest.mark.parametrize(
    ("trained", "place"),
    [({}, "gate"), ({"modules_to_save": ["gate"]}, "gate.modules_to_save.default")],
    ids=["frozen", "copied"],
)
def test_routers_are_found_inside_adapters(trained, place):
    model = get_peft_model(mixture("mixtral"), LoraConfig(r=2, target_modules=["q_proj"], **trained))
    layers = [f"base_model.model.model.layers.{layer}.mlp" for layer in (0, 1)]
    assert [each.name for each in find_routers(model)] == [f"{layer}.{place}" for layer in layers]


def test_routers_with_adapters_of_their_own_are_called_through_them():
    model = get_peft_model(mixture("mixtral"), LoraConfig(r=2, target_parameters=["gate.weight"]))
    assert [each.name.rpartition("mlp.")[2] for each in find_routers(model)] == ["gate.base_layer"] * 2


def test_weights_that_zero3_has_partitioned_are_not_needed():
    model = mixture("deepseek_v3")
    for parameter in model.parameters():
        parameter.ds_shape, parameter.data = parameter.shape, torch.empty(0)
    assert [each.score_function for each in find_routers(model)] == ["sigmoid"]


def test_the_scores_of_a_sigmoid_are_divided_by_their_sum():
    logits = torch.tensor([[0.0, torch.inf, -torch.inf]])
    assert expert_probabilities(logits, "sigmoid").tolist() == [pytest.approx([1 / 3, 2 / 3, 0.0])]
    assert expert_probabilities(torch.zeros(1, 4), "softmax").tolist() == [[0.25] * 4]
