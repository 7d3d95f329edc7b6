"""Parameters that share one partition, as ZeRO has it, on one process."""

import pytest
import torch

from finetune.checkpoint.format.tensor_file import TensorRecord
from finetune.checkpoint.sharding.access import LossScale, StateAccess
from finetune.checkpoint.sharding.state_layout import ShardView, StateLayout
from finetune.errors import CheckpointError
from tests.refusals import refused


@pytest.fixture
def flat():
    return torch.nn.Parameter(torch.arange(6.0))


@pytest.fixture
def optimizer(flat):
    return torch.optim.AdamW([flat], lr=0.1)


@pytest.fixture
def state(flat, optimizer):
    def shard(offset, shape):
        count = shape[0] * shape[1]
        return ShardView(
            tensor=flat,
            local_view=lambda tensor: tensor.detach().narrow(0, offset, count),
            shape=shape,
            start=0,
            stop=count,
            is_trained=True,
            is_replicated=False,
        )

    layout = StateLayout(shards={"a": shard(0, (2, 2)), "b": shard(4, (1, 2))})
    return StateAccess(layout, optimizer, device=torch.device("cpu"), loss_scale=LossScale(scaler=None, deepspeed=None))


def test_each_parameter_has_its_own_shape_and_its_part_of_the_state(flat, optimizer, state):
    flat.grad = torch.arange(6.0)
    optimizer.step()
    assert [(record.stored_name, record.shape) for record in state.records()] == [
        ("a", (2, 2)),
        ("a/exp_avg", (2, 2)),
        ("a/exp_avg_sq", (2, 2)),
        ("b", (1, 2)),
        ("b/exp_avg", (1, 2)),
        ("b/exp_avg_sq", (1, 2)),
    ]
    moments = state.read(TensorRecord("b", "exp_avg", (1, 2), "F32"))
    torch.testing.assert_close(moments, torch.tensor([0.4, 0.5]))
    assert state.read_scalars() == {"a": {"step": 1.0}, "b": {"step": 1.0}}


def test_a_rank_without_elements_of_a_parameter_writes_no_step_count_for_it():
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in (2, 0)]
    optimizer = torch.optim.AdamW(parameters)

    def shard(tensor):
        return ShardView(
            tensor=tensor,
            local_view=torch.Tensor.detach,
            shape=(2,),
            start=0,
            stop=tensor.numel(),
            is_trained=True,
            is_replicated=False,
        )

    layout = StateLayout(shards=dict(zip("ab", map(shard, parameters), strict=True)))
    state = StateAccess(
        layout, optimizer, device=torch.device("cpu"), loss_scale=LossScale(scaler=None, deepspeed=None)
    )
    state.begin_writing()  # creates state for both, as a resume does
    state.write_scalars({"a": {"step": 2.0}, "b": {"step": 2.0}})
    parameters[0].grad = torch.ones(2)  # the other one has no gradient here
    optimizer.step()
    assert state.read_scalars() == {"a": {"step": 3.0}}


def test_a_parameter_that_was_never_updated_has_zero_moments_in_a_shared_flat_tensor(optimizer, flat, state):
    flat.grad = torch.ones(6)
    optimizer.step()
    state.discard_state({"b"})
    assert optimizer.state[flat]["exp_avg"].tolist() == pytest.approx([0.1] * 4 + [0.0] * 2)
    state.discard_state({"a", "b"})
    assert not optimizer.state


def test_two_counts_for_one_place_are_refused_by_name(state):
    with refused(CheckpointError, "a and b"):
        state.write_scalars({"a": {"step": 3.0}, "b": {"step": 2.0}})


def test_making_state_leaves_gradients_and_learning_rate_as_they_were(optimizer, flat, state):
    flat.grad = torch.ones(6)
    state.begin_writing()
    assert flat.grad.tolist() == [1.0] * 6
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert set(optimizer.state[flat]) == {"step", "exp_avg", "exp_avg_sq"}
    assert flat.tolist() == list(range(6))


class Scaler:
    """Stands in for torch's GradScaler, which works only where there is a GPU."""

    def __init__(self):
        self.values = {"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 0}

    def is_enabled(self):
        return True

    def state_dict(self):
        return self.values

    def load_state_dict(self, values):
        self.values = values


class DeepSpeedScaler:
    """Stands in for DeepSpeed's DynamicLossScaler."""

    dynamic = True
    cur_scale, cur_iter, last_overflow_iter, cur_hysteresis = 1024.0, 7, 3, 2


def test_the_loss_scale_comes_back_and_passes_from_one_scaler_to_the_other():
    first = Scaler()
    first.values |= {"scale": 512.0, "_growth_tracker": 9}
    second = Scaler()
    LossScale(scaler=second, deepspeed=None).write(LossScale(scaler=first, deepspeed=None).read())
    assert second.values == first.values
    deepspeed = DeepSpeedScaler()
    LossScale(scaler=None, deepspeed=deepspeed).write(LossScale(scaler=first, deepspeed=None).read())
    assert (deepspeed.cur_scale, deepspeed.cur_iter) == (512.0, 7)
    LossScale(scaler=second, deepspeed=None).write(LossScale(scaler=None, deepspeed=DeepSpeedScaler()).read())
    assert second.values["scale"] == 1024.0
