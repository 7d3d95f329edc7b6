"""Gradients of the microbatches before the last: reduced at once, or accumulated where they are if that fits."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

from finetune.strategy.choose import DataParallel, FullySharded, ZeroRedundancy
from finetune.strategy.environment import LaunchEnvironment
from finetune.strategy.gradient_sync import (
    GradientReduction,
    accumulate_gradients,
    choose_accumulation,
    keep_experts_in_graph,
    separate_experts,
    set_zero3_leaf_modules,
)
from finetune.strategy.reconcile import JobSettings
from tests.devices import NEEDS_DEEPSPEED
from tests.task.test_router_loss import mixture

GB = 10**9
JOB = JobSettings(strategy=None, precision="bf16", microbatch_size=1, max_gradient_norm=1.0)


class RecordedCalls:
    """A model and an accelerator in one, which note what they are asked."""

    def __init__(self, *, is_fsdp2: bool, reshards: bool | None) -> None:
        self.lines: list[str] = []
        self.is_fsdp2 = is_fsdp2
        plugin = None if reshards is None else SimpleNamespace(reshard_after_forward=reshards)
        self.state = SimpleNamespace(fsdp_plugin=plugin)

    @contextmanager
    def no_sync(self, model):
        self.lines.append("no sync")
        yield
        self.lines.append("sync")

    def set_reshard_after_backward(self, reshards: bool) -> None:
        self.lines.append(f"reshard {reshards}")


@pytest.mark.parametrize(("is_fsdp2", "reshards"), [(False, None), (True, True), (False, False)])
def test_the_ranks_do_not_communicate(is_fsdp2, reshards):
    calls = RecordedCalls(is_fsdp2=is_fsdp2, reshards=reshards)
    with accumulate_gradients(calls, calls):
        assert calls.lines == ["no sync"]
    assert calls.lines == ["no sync", "sync"]


def test_gradients_are_synchronized_after_every_microbatch_if_each_is_reduced():
    calls = RecordedCalls(is_fsdp2=True, reshards=True)
    with accumulate_gradients(calls, calls, reduces=True):
        pass
    assert calls.lines == []


@pytest.mark.parametrize(("reduces", "around"), [(False, ["no sync", "sync"]), (True, [])])
def test_parameters_that_are_not_resharded_stay_whole_until_the_last_microbatch(reduces, around):
    calls = RecordedCalls(is_fsdp2=True, reshards=False)
    with accumulate_gradients(calls, calls, reduces=reduces):
        assert calls.lines == [*around[:1], "reshard False"]
    assert calls.lines == [*around[:1], "reshard False", "reshard True", *around[1:]]


def choose(reduction=GradientReduction.EITHER, **changed):
    given = {"num_batches": 4, "num_processes": 8, "unsharded_bytes": 32 * GB, "free_bytes": 64 * GB}
    return choose_accumulation(reduction, **{**given, **changed})


def test_a_gradient_that_takes_half_of_what_is_left_is_kept_whole_and_counted():
    found = choose()
    assert (found.reduces_every_microbatch, found.unsharded_gradient_bytes) == (False, 32 * GB)
    assert found.reason == (
        "gradient accumulation: gradients are reduced once a step; until then each rank keeps the whole gradient of "
        "32.0 GB, of the 64.0 GB left"
    )


def test_a_gradient_too_large_to_keep_whole_is_reduced_after_every_microbatch():
    found = choose(free_bytes=64 * GB - 1)
    assert (found.reduces_every_microbatch, found.unsharded_gradient_bytes) == (True, 0)
    assert found.reason == (
        "gradient accumulation: gradients are reduced after each of the 4 microbatches, since the whole gradient of "
        "32.0 GB on each rank would take more than half of the 64.0 GB left for activations"
    )


def test_less_than_nothing_is_left_where_the_estimate_is_over_the_memory():
    assert "half of the 0 B left" in choose(free_bytes=-5 * GB).reason


def test_one_process_and_deterministic_runs_reduce_every_microbatch_regardless_of_free_memory():
    assert choose(num_processes=1, free_bytes=10**15).reduces_every_microbatch
    assert choose(is_deterministic=True, free_bytes=10**15).reduces_every_microbatch


def test_a_sum_in_bfloat16_is_the_last_resort():
    for changed in ({}, {"num_processes": 1}, {"is_deterministic": True}):
        assert not choose(has_bf16_shards=True, **changed).reduces_every_microbatch
    found = choose(has_bf16_shards=True, free_bytes=0)
    assert found.reduces_every_microbatch
    assert found.reason.endswith("; their sum is kept in bfloat16, like the weights")


def test_a_fixed_gradient_reduction_is_neither_chosen_nor_logged():
    for found in (choose(num_batches=1), choose(GradientReduction.LAST), choose(GradientReduction.EVERY)):
        assert (found.unsharded_gradient_bytes, found.reason) == (0, None)
    assert not choose(GradientReduction.LAST, free_bytes=0).reduces_every_microbatch
    assert choose(GradientReduction.EVERY).reduces_every_microbatch


def test_each_strategy_declares_after_which_microbatches_it_can_reduce():
    def of(kind, *job, **environment):
        return kind(LaunchEnvironment(world=8, **environment), *job).reduction

    assert of(DataParallel) == GradientReduction.LAST
    assert of(ZeroRedundancy, JOB, zero_stage=1) == GradientReduction.LAST
    assert of(ZeroRedundancy, JOB, zero_stage=2) == GradientReduction.EVERY
    assert of(FullySharded, JOB, is_fsdp=True) == GradientReduction.EITHER
    assert of(FullySharded, JOB, is_fsdp=True, fsdp_offload_params=True) == GradientReduction.EITHER


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
