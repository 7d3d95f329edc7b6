"""Activations that are offloaded or recomputed give the same loss and gradients, and no weight is offloaded."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.config.sections.model import LoraSection
from finetune.errors import ModelError
from finetune.model.activations import (
    Arrival,
    enable_gradient_checkpointing,
    is_saved,
    offload_activations,
)
from finetune.model.adapters.build import add_adapter
from finetune.model.adapters.context import AdapterContext
from finetune.model.adapters.single_pass import use_single_pass
from finetune.model.kernels import compilation
from finetune.model.kernels.compilation import compile_model
from finetune.task.model_inputs import unwrap_model
from tests.devices import EVERY_DEVICE
from tests.live_bytes import peak_memory, saved_bytes
from tests.model.attention.flash_on_cpu import flash_on_cpu
from tests.model.attention.small_models import row_of, tiny_model, tokens
from tests.refusals import refused

IDS = torch.arange(24).reshape(2, 12)


def gradients(model, *, seed=3):
    torch.manual_seed(seed)
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


SMALLEST = 512


class HostCopies:
    """Synchronous copies within host memory."""

    device_type = "cpu"

    def to_host(self, tensor):
        return tensor.clone()

    def to_device(self, host, device):
        return Arrival(host.to(device, copy=True), None)

    def wait(self, arrival):
        pass

    def finish(self):
        pass


class Counting(HostCopies):
    """Counts copies within host memory."""

    def __init__(self):
        self.num_to_host = self.num_to_device = 0
        self.moved = Counter()  # by content

    def to_host(self, tensor):
        self.num_to_host += 1
        self.moved[content(tensor)] += 1
        return super().to_host(tensor)

    def to_device(self, host, device):
        self.num_to_device += 1
        return super().to_device(host, device)


def content(tensor):
    return bytes(tensor.detach().contiguous().flatten().view(torch.uint8).tolist())


def offloaded(model):
    copies = Counting()
    offload_activations(model, copies=lambda: copies, smallest_bytes=SMALLEST)
    return copies


@pytest.mark.parametrize("mode", [False, True, "selective"])
def test_offloaded_activations_return_bitwise_identical(from_config, build, mode):
    plain, offloading = build(from_config()), build(from_config(gradient_checkpointing=mode))
    copies = offloaded(offloading)
    loss, expected = gradients(plain)
    again, found = gradients(offloading)
    assert torch.equal(again, loss)
    assert all(map(torch.equal, found, expected))
    assert copies.num_to_host == copies.num_to_device > 2


def test_an_evaluation_offloads_nothing(from_config, build):
    model = build(from_config())
    copies = offloaded(model)
    model.eval()(input_ids=IDS, labels=IDS).loss.backward()
    with torch.no_grad():
        model.train()(input_ids=IDS)
    assert copies.num_to_host == 0


def forms(weight):
    """Yield the weight in the forms that an operator may save: unchanged, transposed, in bfloat16."""
    for each in (weight, weight.to(torch.bfloat16)):
        yield from (content(each), content(each.t() if each.ndim == 2 else each))


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", ["llama untied", "gpt2 tied"])
@pytest.mark.parametrize("casts", [False, True])
def test_no_activation_is_offloaded_twice_and_no_weight_at_all(
    from_config, build, monkeypatch, casts, name, lora, is_compiled
):
    model = build(from_config(name)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter) / 10)  # a norm's factor of one would return what it is given
    if lora:
        model = add_adapter(model, LoraSection(rank=16), AdapterContext(seed=1))
        use_single_pass(model, in_place=True)  # casts the common input of queries, keys and values once
    if is_compiled:
        monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
        torch._dynamo.reset()
        compile_model(unwrap_model(model), "regional", log=lambda _: None)
    copies = offloaded(model)
    ids = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16) if casts else nullcontext():
        loss = model(input_ids=ids, labels=ids.roll(1)).loss
    loss.backward()
    weights = {form for parameter in model.parameters() for form in forms(parameter)}
    assert copies.num_to_host == copies.num_to_device > 10
    assert not weights.intersection(copies.moved)
    if not is_compiled:
        assert [number for number in copies.moved.values() if number > 1] == []


@pytest.fixture
def group_of_one():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_gathered_parameters_are_not_offloaded_as_activations(from_config, build):
    """FSDP2 frees them after a layer and gathers them again, so a copy on the host would be useless."""
    model = build(from_config()).train()
    weights = {form for parameter in model.parameters() for form in forms(parameter)}
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    copies = offloaded(model)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert copies.num_to_host == copies.num_to_device > 5
    assert not weights.intersection(copies.moved)
    assert all(parameter.grad is not None for parameter in model.parameters())


def llama(device):
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2}
    if device == "cuda":
        sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=1000, num_hidden_layers=12, max_position_embeddings=16384, **sizes)
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(device).train()


class CopiesOutOfSight(HostCopies):
    """Copies in uncounted host memory, which a GPU's allocator does not see."""

    def to_host(self, tensor):
        return torch.from_numpy(tensor.contiguous().view(torch.uint8).numpy().copy()).view(tensor.dtype)


def steps(device, *, offloads):
    """Return the peak of the third step and its loss."""
    model = llama(device)
    if offloads:
        how = {"copies": CopiesOutOfSight, "smallest_bytes": 4096} if device == "cpu" else {}
        offload_activations(model, **how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(0, 1000, (1, 8192 if device == "cuda" else 512), device=device)
    for _ in range(3):
        with peak_memory(device) as memory:
            with torch.autocast(device, torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return memory.peak, loss.item()


@EVERY_DEVICE
def test_the_third_step_takes_six_tenths_of_the_memory(device, figure):
    (plain, expected), (offloading, found) = (steps(device, offloads=each) for each in (False, True))
    figure(f"peak of the third step, activations offloaded over not ({device})", offloading / plain, at_most=0.6)
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("mode", [True, 2, "selective"])
def test_recomputation_does_not_change_loss_or_gradients_with_dropout(from_config, build, mode):
    plain, recomputing = build(from_config()), build(from_config(gradient_checkpointing=mode))
    for model in (plain, recomputing):
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.3
    loss, expected = gradients(plain)
    again, found = gradients(recomputing)
    assert torch.equal(again, loss)
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(gradients(plain, seed=4)[0], loss)  # there is chance in it


def test_every_second_layer_saves_less_than_every_one(from_config, build):
    models = (build(from_config(gradient_checkpointing=mode)) for mode in (False, 2, True))
    plain, half, full = (saved_bytes(each, lambda model: model(input_ids=IDS, labels=IDS).loss) for each in models)
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
    """Return the number of attention calls of a step, and its gradients."""
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
    return forward.count, backward.count, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_selective_computes_attention_once_per_layer(implementation):
    forward, again, found = attention_calls(implementation, "selective")
    _, whole, expected = attention_calls(implementation, True)
    assert forward == whole > 0
    assert again == (2 if implementation == "eager" else 0)  # its softmax is cheap; its products are saved
    assert all(map(torch.equal, found, expected))


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
    """Operators of packages that are not installed here are matched by name, and no others of these packages."""
    assert is_saved(name)
    assert is_saved(f"{name}.default")
    assert not is_saved(name.replace("fwd", "bwd").replace("forward", "backward").replace("attn", "attn_backward"))


def test_checkpointing_every_nth_layer_needs_n_layers(from_config, build):
    with refused(ModelError, "`llama`", "2 layers"):
        enable_gradient_checkpointing(build(from_config()), 3)


class Products(TorchDispatchMode):
    """Counts the computed matrix products."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.count += function is torch.ops.aten.mm.default
        return function(*arguments, **(keywords or {}))
