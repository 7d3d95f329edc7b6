"""Recomputed activations change what is held and no number."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.errors import ModelError
from finetune.model.activations import HostCopies, enable_gradient_checkpointing, offload_activations, saved_operators

IDS = torch.arange(24).reshape(2, 12)


def gradients(model, *, seed=3):
    torch.manual_seed(seed)
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), [each.grad for each in model.parameters()]


def saved_bytes(model):
    """Return the bytes that the forward pass leaves for the backward pass, beside the weights."""
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=IDS, labels=IDS).loss
    assert loss.requires_grad
    return sum(found.values())


@pytest.mark.parametrize("mode", [True, 2, "selective"])
def test_loss_and_gradients_stay_what_they_are_with_dropout(from_config, build, mode):
    plain, recomputing = build(from_config()), build(from_config(gradient_checkpointing=mode))
    for model in (plain, recomputing):
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.3
    loss, wanted = gradients(plain)
    again, found = gradients(recomputing)
    assert torch.equal(again, loss)
    assert all(map(torch.equal, found, wanted))
    assert not torch.equal(gradients(plain, seed=4)[0], loss)  # there is chance in it


def test_every_second_layer_saves_less_than_every_one(from_config, build):
    plain, half, full = (saved_bytes(build(from_config(gradient_checkpointing=mode))) for mode in (False, 2, True))
    assert full < half < plain
    model = build(from_config(gradient_checkpointing=2))
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, False]


def test_what_is_dear_is_not_computed_again(from_config, build):
    def products(mode):
        model = build(from_config(gradient_checkpointing=mode))
        loss = model(input_ids=IDS, labels=IDS).loss
        with Products() as mode:
            loss.backward()
        return mode.count

    assert products("selective") == products(False) < products(True)
    assert {"aten::mm", "aten::addmm", "aten::bmm"} <= {each.name() for each in saved_operators()}


def test_more_layers_than_there_are_cannot_be_left_out(from_config, build):
    with pytest.raises(ModelError, match="too many for `llama`, which has 2 layers"):
        enable_gradient_checkpointing(build(from_config()), 3)


@pytest.mark.parametrize("mode", [False, True, "selective"])
def test_activations_that_went_to_the_host_come_back_as_they_were(from_config, build, mode):
    copies = Counting()
    plain, offloading = build(from_config()), build(from_config(gradient_checkpointing=mode))
    offload_activations(offloading, copies=lambda: copies, smallest_bytes=512)
    loss, wanted = gradients(plain)
    again, found = gradients(offloading)
    assert torch.equal(again, loss)
    assert all(map(torch.equal, found, wanted))
    assert copies.num_to_host == copies.num_to_device > 2
    weights = {tuple(each.shape) for each in plain.parameters()}
    assert not weights.intersection(copies.shapes | {shape[::-1] for shape in copies.shapes})


def test_an_evaluation_offloads_nothing(from_config, build):
    copies = Counting()
    model = build(from_config())
    offload_activations(model, copies=lambda: copies, smallest_bytes=512)
    model.eval()(input_ids=IDS, labels=IDS).loss.backward()
    with torch.no_grad():
        model.train()(input_ids=IDS)
    assert copies.num_to_host == 0


class Products(TorchDispatchMode):
    """Counts the matrix products that are really computed."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.count += function is torch.ops.aten.mm.default
        return function(*arguments, **(keywords or {}))


class Counting(HostCopies):
    """Copies within the host's memory, counted."""

    def __init__(self):
        self.num_to_host = self.num_to_device = 0
        self.shapes = set()

    def to_host(self, tensor):
        self.num_to_host += 1
        self.shapes.add(tuple(tensor.shape))
        return super().to_host(tensor)

    def to_device(self, host, device):
        self.num_to_device += 1
        return super().to_device(host, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_holds_less_while_activations_are_in_the_host():
    def peak(offloads):
        torch.manual_seed(0)
        layers = [layer for _ in range(8) for layer in (torch.nn.Linear(1024, 1024), torch.nn.GELU())]
        model = torch.nn.Sequential(*layers).cuda()
        if offloads:
            offload_activations(model)
        rows = torch.randn(8192, 1024, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        model(rows).square().mean().backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(), [each.grad.clone() for each in model.parameters()]

    (plain, wanted), (offloading, found) = peak(False), peak(True)
    assert offloading < 0.7 * plain
    assert all(map(torch.equal, found, wanted))
