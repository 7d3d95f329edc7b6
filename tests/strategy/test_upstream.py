"""The gloo bridge replaces one private function of Accelerate; these fail loudly when Accelerate changes it."""

import inspect
import os
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import FSDPModule

from finetune.errors import StrategyError
from finetune.strategy.upstream import (
    MIN_BUCKET_NUMEL,
    drop_not_yet_unfrozen_from_zero_norm,
    gloo_bridge,
    prefetch_fsdp2_layers,
    set_zero_bucket_sizes,
    unsharded,
    zero_bucket_sizes,
)


def test_the_function_that_is_replaced_still_answers_backend_and_type():
    parameters = list(inspect.signature(PartialState._prepare_backend).parameters)
    assert parameters == ["self", "cpu", "sagemaker_dp", "backend"]
    assert "self._prepare_backend(" in inspect.getsource(PartialState.__init__)


def test_the_bridge_answers_gloo_only_while_it_stands(monkeypatch):
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "")
    monkeypatch.setenv("DS_ACCELERATOR", "")
    before = PartialState._prepare_backend
    with gloo_bridge():
        assert PartialState._prepare_backend(None, False) == ("gloo", DistributedType.MULTI_GPU)
    assert PartialState._prepare_backend is before


FLAG = "FSDP_CPU_RAM_EFFICIENT_LOADING"


def test_ranks_that_are_sent_their_weights_load_a_second_model_whole(monkeypatch):
    monkeypatch.setenv(FLAG, "true")
    with unsharded(SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=None))):
        assert FLAG not in os.environ
    assert os.environ[FLAG] == "true"


def test_zero_3_is_switched_on_again_even_after_an_error(monkeypatch):
    monkeypatch.delenv(FLAG, raising=False)
    calls = []
    plugin = SimpleNamespace(set_deepspeed_weakref=lambda: calls.append("on"))
    monkeypatch.setattr("finetune.strategy.upstream.unset_hf_deepspeed_config", lambda: calls.append("off"))
    with pytest.raises(OSError), unsharded(SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))):
        assert calls == ["off"]
        raise OSError
    assert calls == ["off", "on"]
    assert FLAG not in os.environ


class Unit(nn.Linear, FSDPModule):
    """A layer that is told which one follows."""

    def __new__(cls, *args, **named):
        return nn.Module.__new__(cls)

    def __init__(self):
        super().__init__(2, 2)
        self.asks_for = []

    def set_modules_to_forward_prefetch(self, modules):
        self.asks_for.extend(id(each) for each in modules)


def towers():
    model = nn.Module()
    model.vision = nn.ModuleList([Unit(), Unit()])
    model.layers = nn.ModuleList([Unit(), nn.Identity(), Unit()])
    model.head = Unit()
    return model


def told(*, is_fsdp2, prefetches):
    plugin = None if prefetches is None else SimpleNamespace(forward_prefetch=prefetches)
    return SimpleNamespace(is_fsdp2=is_fsdp2, state=SimpleNamespace(fsdp_plugin=plugin))


def test_each_layer_asks_for_the_next_of_its_list():
    model = towers()
    prefetch_fsdp2_layers(told(is_fsdp2=True, prefetches=True), model)
    assert model.vision[0].asks_for == [id(model.vision[1])]
    assert model.layers[0].asks_for == [id(model.layers[2])]
    assert not any(unit.asks_for for unit in (model.vision[1], model.layers[2], model.head))


@pytest.mark.parametrize(("is_fsdp2", "prefetches"), [(True, False), (True, None), (False, True), (False, None)])
def test_nobody_asks_otherwise(is_fsdp2, prefetches):
    model = towers()
    prefetch_fsdp2_layers(told(is_fsdp2=is_fsdp2, prefetches=prefetches), model)
    assert not any(unit.asks_for for unit in model.modules() if isinstance(unit, Unit))


def accelerator_of(zero: dict | None) -> SimpleNamespace:
    plugin = None if zero is None else SimpleNamespace(deepspeed_config={"zero_optimization": zero})
    return SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))


def model_of(width: int) -> nn.Module:
    model = nn.Linear(width, width)
    model.config = SimpleNamespace(hidden_size=width)
    return model


def test_a_large_model_reduces_a_matrix_at_a_time_and_a_small_one_everything_at_once():
    assert zero_bucket_sizes(num_trained=10**10, width=4096, stage=2) == {"reduce_bucket_size": 4096 * 4096}
    assert zero_bucket_sizes(num_trained=10**8, width=512, stage=2) == {"reduce_bucket_size": MIN_BUCKET_NUMEL}
    assert zero_bucket_sizes(num_trained=1000, width=32, stage=1) == {"reduce_bucket_size": 1000}


def test_stage_3_gathers_ahead_nearly_a_bucket_and_keeps_vectors_whole():
    assert zero_bucket_sizes(num_trained=10**10, width=4096, stage=3) == {
        "reduce_bucket_size": 16_777_216,
        "stage3_prefetch_bucket_size": 15_099_494,
        "stage3_param_persistence_threshold": 40_960,
    }


def test_what_is_left_out_or_auto_is_filled_in_and_what_is_written_stays():
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": 7}
    set_zero_bucket_sizes(accelerator_of(zero), model_of(4))
    assert zero == {
        "stage": 3,
        "reduce_bucket_size": 20,
        "stage3_prefetch_bucket_size": 7,
        "stage3_param_persistence_threshold": 40,
    }


def test_without_deepspeed_nothing_is_filled_in():
    set_zero_bucket_sizes(accelerator_of(None), model_of(4))


class Engine(nn.Module):
    """What is read of DeepSpeed's engine: three gradients of two groups, the second of which waits."""

    def __init__(self, **others) -> None:
        super().__init__()
        gradients = {number: [torch.ones(2)] for number in range(3)}
        groups = [{"waits": False}, {"waits": True}, {}]
        norm = lambda: sum(float(each.sum()) for some in gradients.values() for each in some)  # noqa: E731
        inner = SimpleNamespace(param_groups=groups)
        self.optimizer = SimpleNamespace(averaged_gradients=gradients, optimizer=inner, step=norm, **others)

    def zero_optimization_stage(self) -> int:
        return 2


@pytest.mark.parametrize(("others", "norm"), [({}, 4.0), ({"sub_group_to_group_id": {0: 1, 1: 1, 2: 0}}, 2.0)])
def test_a_waiting_groups_gradients_are_zero_before_the_norm_is_taken(others, norm):
    engine = Engine(**others)
    drop_not_yet_unfrozen_from_zero_norm(engine)
    assert engine.optimizer.step() == norm


def test_other_models_are_left_alone():
    drop_not_yet_unfrozen_from_zero_norm(nn.Linear(1, 1))


def test_gradients_that_lie_elsewhere_are_refused():
    engine = Engine()
    del engine.optimizer.averaged_gradients
    with pytest.raises(StrategyError, match="not under DeepSpeed's SimpleNamespace"):
        drop_not_yet_unfrozen_from_zero_norm(engine)
