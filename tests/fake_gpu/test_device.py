"""Tensors that count as a GPU's are where they would be, and each wait of the host for the GPU is found."""

import pytest
import torch
from torch import nn

from tests.fake_gpu.device import FakeGpu
from tests.fake_gpu.machine import MACHINES, on_machine


@pytest.fixture
def gpu():
    fake = FakeGpu()
    with on_machine(fake, MACHINES["H100"]), fake, fake.watching():
        yield fake


def waits(gpu):
    """Return the operations that were reported, without who called them."""
    return [finding.operation.removeprefix("aten::") for finding in gpu.findings]


def test_results_gradients_and_optimizer_states_are_where_their_inputs_are(gpu):
    model = nn.Linear(4, 4).to("cuda")
    loss = model(torch.ones(2, 4, device="cuda")).pow(2).sum()
    loss.backward()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.step()
    state = optimizer.state[model.weight]
    tensors = [model.weight, model.weight.T, loss, loss.detach(), model.bias.grad, state["exp_avg"], state["step"]]
    assert {str(tensor.device) for tensor in tensors} == {"cuda:0"}
    assert [str(torch.ones(2).device), str(model.weight.cpu().device)] == ["cpu", "cpu"]


def test_a_tensor_of_the_cpu_in_an_operation_of_the_gpu_is_refused_but_a_scalar(gpu):
    weight = torch.ones(2, 2, device="cuda")
    assert (weight * torch.tensor(3.0)).is_cuda
    with pytest.raises(RuntimeError, match=r"mul: expected all tensors to be on the same device"):
        weight * torch.ones(2)


@pytest.mark.parametrize(
    ("operation", "found"),
    [
        (lambda row: row.sum().item(), "_local_scalar_dense"),
        (lambda row: float(row.sum()), "_local_scalar_dense"),
        (lambda row: bool(row.any()), "_local_scalar_dense"),
        (lambda row: row.tolist(), "Tensor.tolist"),
        (lambda row: row.nonzero(), "nonzero"),
        (lambda row: row[row > 0], "index"),
        (lambda row: torch.unique(row), "_unique2"),
        (lambda row: row.repeat_interleave(torch.ones(3, dtype=torch.int64, device="cuda")), "repeat_interleave"),
        (lambda row: row.cpu(), "_to_copy"),
        (lambda row: torch.empty(3).copy_(row), "copy_"),
        (lambda row: torch.tensor([1.0], device="cuda"), "torch.tensor"),
        (lambda row: torch.ones(3).to("cuda"), "_to_copy"),
        (lambda row: torch.ones(3).to("cuda", non_blocking=True), "_to_copy"),
        (lambda row: torch.ones(3).pin_memory().to("cuda"), "_to_copy"),
        (lambda row: torch.cuda.synchronize(), "torch.cuda.synchronize"),
    ],
)
def test_each_wait_of_the_host_is_reported(gpu, operation, found):
    operation(torch.ones(3, device="cuda"))
    assert waits(gpu) == [found]


def test_queued_work_is_not_reported(gpu):
    row = torch.ones(3, device="cuda")
    torch.ones(3).pin_memory().to("cuda", non_blocking=True)
    row.to("cpu", non_blocking=True)
    row.to("cuda")
    row[torch.zeros(2, dtype=torch.int64, device="cuda")]
    row.masked_fill(row > 0, 2.0)
    torch.nn.utils.rnn.pad_sequence([row, row[:1]], batch_first=True).sum()
    torch.nn.utils.clip_grad_norm_([nn.Parameter(row)], 1.0)
    assert waits(gpu) == []


def test_values_of_the_gpu_cannot_become_an_array(gpu):
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu\(\) first"):
        torch.ones(3, device="cuda").numpy()


def test_torch_is_as_before_afterwards():
    with on_machine(fake := FakeGpu(), MACHINES["T4"]), fake:
        assert torch.cuda.get_device_capability() == (7, 5)
        assert torch.ones(1, device="cuda").is_cuda
    assert not torch.cuda.is_available()
    assert str(torch.ones(1).to("cpu").device) == "cpu"
