"""Layers of FSDP2 ask for the next one's parameters early where the accelerate file says so."""

from types import SimpleNamespace

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule

from finetune.strategy.prefetch import prefetch_layers


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
    prefetch_layers(told(is_fsdp2=True, prefetches=True), model)
    assert model.vision[0].asks_for == [id(model.vision[1])]
    assert model.layers[0].asks_for == [id(model.layers[2])]
    assert not any(unit.asks_for for unit in (model.vision[1], model.layers[2], model.head))


@pytest.mark.parametrize(("is_fsdp2", "prefetches"), [(True, False), (True, None), (False, True), (False, None)])
def test_nobody_asks_otherwise(is_fsdp2, prefetches):
    model = towers()
    prefetch_layers(told(is_fsdp2=is_fsdp2, prefetches=prefetches), model)
    assert not any(unit.asks_for for unit in model.modules() if isinstance(unit, Unit))
