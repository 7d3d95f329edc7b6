"""ZeRO takes its gradient norm of the groups that learn."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from finetune.errors import StrategyError
from finetune.strategy.waiting import leave_waiting_out_of_norm


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
    leave_waiting_out_of_norm(engine)
    assert engine.optimizer.step() == norm


def test_other_models_are_left_alone():
    leave_waiting_out_of_norm(nn.Linear(1, 1))


def test_gradients_that_lie_elsewhere_are_refused():
    engine = Engine()
    del engine.optimizer.averaged_gradients
    with pytest.raises(StrategyError, match="not under DeepSpeed's SimpleNamespace"):
        leave_waiting_out_of_norm(engine)
