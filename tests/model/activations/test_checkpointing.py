"""Recomputed activations change what is held and no number."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from finetune.errors import ModelError
from finetune.model.activations import checkpointing
from finetune.model.activations.checkpointing import enable_gradient_checkpointing, is_saved
from tests.model.attention.flash_on_cpu import flash_on_cpu
from tests.model.attention.small_models import row_of, tiny_model, tokens

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
def test_recomputation_does_not_change_loss_or_gradients_with_dropout(from_config, build, mode):
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


def test_selective_checkpointing_does_not_recompute_matrix_products(from_config, build):
    def products(mode):
        model = build(from_config(gradient_checkpointing=mode))
        loss = model(input_ids=IDS, labels=IDS).loss
        with Products() as mode:
            loss.backward()
        return mode.count

    assert products("selective") == products(False) < products(True)


IMPLEMENTATIONS = ["per_sample", "sdpa", "eager", "flash_on_cpu"]
LIBRARIES = [
    *("flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward", "flash_attn_3::fwd"),
    *("flash_attn_3::_flash_attn_forward", "_flash_attn2_9e27194::varlen_fwd", "_vllm_flash_attn3_1d39a44::fwd"),
    *("_flash_attn3_48fe103::fwd", "torch_attn::_varlen_attn"),
]


class Attention(TorchDispatchMode):
    """Counts the attention operators that are called, by name, and softmax, which is eager attention's alone."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function.name().partition(".")[0]
        is_forward = "attention" in name or "attn" in name or name == "aten::_softmax"
        self.count += is_forward and "backward" not in name
        return function(*arguments, **(keywords or {}))


def packed_row():
    lengths = (5, 9, 1)
    edges = torch.tensor([0, *lengths]).cumsum(0).int()
    row = row_of([tokens(length, salt) for salt, length in enumerate(lengths)])
    return {**row, "cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": 9, "max_length_k": 9}


def attention_calls(implementation, mode, *, kind="llama"):
    """Return how often a step computes attention, and its gradients."""
    given = {"input_ids": tokens(12, 0)} if implementation in ("sdpa", "eager") else packed_row()
    is_flash = implementation == "flash_on_cpu"
    with flash_on_cpu() if is_flash else nullcontext():
        model = tiny_model(kind, "per_sample" if is_flash else implementation).train()
        if mode:
            enable_gradient_checkpointing(model, mode)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_flash):
            with Attention() as forward:
                loss = model(**given).logits.float().square().mean()
            with Attention() as backward:
                loss.backward()
    return forward.count, backward.count, [each.grad for each in model.parameters()]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_selective_computes_attention_once_per_layer(implementation):
    forward, again, found = attention_calls(implementation, "selective")
    _, whole, wanted = attention_calls(implementation, True)
    assert forward == whole > 0
    assert again == (2 if implementation == "eager" else 0)  # its softmax is cheap; its products are saved
    assert all(map(torch.equal, found, wanted))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("implementation", ["per_sample", "sdpa"])
def test_selective_computes_attention_once_per_layer_on_a_gpu(implementation, figure):
    sizes = {"hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 16, "head_dim": 128}
    model = tiny_model("llama", implementation, **sizes).cuda().train()
    enable_gradient_checkpointing(model, "selective")
    given = packed_row() if implementation == "per_sample" else {"input_ids": tokens(12, 0)}
    given = {name: each.cuda() if isinstance(each, torch.Tensor) else each for name, each in given.items()}
    with torch.autocast("cuda", torch.bfloat16), Attention() as forward:
        loss = model(**given).logits.float().square().mean()
    with Attention() as backward:
        loss.backward()
    assert forward.count == 2
    figure(
        f"attention forward passes per layer and step, selective, {implementation}", 1 + backward.count / 2, at_most=1
    )


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_results_of_every_attention_library_are_saved(name):
    """The operators of packages that are not installed here, under their names; and nothing else of theirs."""
    assert is_saved(name)
    assert is_saved(f"{name}.default")
    assert not is_saved(name.replace("fwd", "bwd").replace("forward", "backward").replace("attn", "attn_backward"))


def test_an_operator_of_flash_attention_that_is_registered_later_is_called_once(monkeypatch):
    """`flash_attn` is imported when the first layer runs, after checkpointing was enabled."""
    calls = []
    weight = torch.ones(4, 4, requires_grad=True)
    context = partial(create_selective_checkpoint_contexts, checkpointing._policy)
    with torch.library._scoped_library("flash_attn", "FRAGMENT") as library:
        library.define("_flash_attn_varlen_forward(Tensor q) -> Tensor")
        library.impl("_flash_attn_varlen_forward", lambda q: calls.append(1) or q.clone(), "CompositeExplicitAutograd")

        class Flash(torch.autograd.Function):
            @staticmethod
            def forward(context, q):
                return torch.ops.flash_attn._flash_attn_varlen_forward(q)

            @staticmethod
            def backward(context, gradient):
                return gradient

        result = checkpoint(lambda q: Flash.apply(q * 2).sin(), weight, use_reentrant=False, context_fn=context)
        result.sum().backward()
    assert len(calls) == 1
    assert weight.grad is not None


def test_more_layers_than_there_are_cannot_be_left_out(from_config, build):
    with pytest.raises(ModelError, match="too many for `llama`, which has 2 layers"):
        enable_gradient_checkpointing(build(from_config()), 3)


class Products(TorchDispatchMode):
    """Counts the matrix products that are really computed."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.count += function is torch.ops.aten.mm.default
        return function(*arguments, **(keywords or {}))
