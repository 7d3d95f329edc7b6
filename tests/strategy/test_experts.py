"""Experts that are modules of their own: every rank gives each a gradient, in one order."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

from finetune.strategy.experts import keep_experts_in_graph, separate_experts, set_zero3_leaf_modules
from tests.devices import NEEDS_DEEPSPEED
from tests.task.test_router_loss import mixture


class ListOfExperts(nn.Module):
    """A layer as older models have it: half of its tokens go to the first expert, none to the last."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, hidden):
        return self.experts[0](hidden[:1]) + self.experts[1](hidden[1:])


def switch():
    sizes = {"d_model": 8, "d_ff": 8, "d_kv": 4, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 2}
    config = SwitchTransformersConfig(
        **sizes,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_experts=4,
        vocab_size=16,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    return SwitchTransformersForConditionalGeneration(config)


def test_lists_of_experts_are_found_with_the_module_that_calls_them():
    layer = ListOfExperts()
    assert list(separate_experts(layer)) == [(layer, layer.experts)]
    found = list(separate_experts(switch()))
    assert len(found) == 2 and all(caller is experts for caller, experts in found)  # the list has a forward of its own
    assert list(separate_experts(mixture("mixtral"))) == []  # one parameter for all of a layer


def test_an_expert_without_tokens_gets_a_gradient_of_zero_and_the_others_theirs():
    hidden = torch.randn(2, 2, generator=torch.Generator().manual_seed(0))
    plain, kept = ListOfExperts(), ListOfExperts()
    kept.load_state_dict(plain.state_dict())
    keep_experts_in_graph(kept)
    for layer in (plain, kept):
        layer(hidden).square().sum().backward()
    assert torch.equal(kept(hidden), plain(hidden))
    first, second, last = (each.weight.grad for each in kept.experts)
    assert torch.equal(first, plain.experts[0].weight.grad) and torch.equal(second, plain.experts[1].weight.grad)
    assert plain.experts[2].weight.grad is None and not last.any()


def order_of_gradients(seed, *, is_kept):
    model, order = switch(), []
    if is_kept:
        keep_experts_in_graph(model)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    ids = torch.randint(1, 16, (1, 2), generator=torch.Generator().manual_seed(seed))
    model(input_ids=ids, labels=ids).loss.backward()
    return order


def test_gradients_come_in_one_order_whichever_experts_were_used():
    one, other = (order_of_gradients(seed, is_kept=True) for seed in (0, 1))
    assert sum("expert_" in name for name in one) == 2 * 4 * 2
    assert one == other
    assert order_of_gradients(0, is_kept=False) != order_of_gradients(1, is_kept=False)


@NEEDS_DEEPSPEED
@pytest.mark.parametrize(("stage", "num_leaves"), [(3, 2), (2, 0)])
def test_zero3_gathers_all_experts_of_a_layer_at_once(stage, num_leaves):
    model = switch()
    plugin = SimpleNamespace(deepspeed_config={"zero_optimization": {"stage": stage}})
    set_zero3_leaf_modules(SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)), model)
    assert sum(getattr(each, "_z3_leaf", False) for each in model.modules()) == num_leaves
