"""The varlen kernel computes the attention of each sample, forward and backward, deterministically if requested."""

import gc
from contextlib import contextmanager
from itertools import accumulate
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from finetune.model.attention import sample_attention
from finetune.model.attention.implementation import per_sample_attention
from finetune.model.attention.sample_attention import (
    AttentionSettings,
    AvailableKernels,
    QueryKeyValue,
    detect_kernels,
    varlen_kernel,
)
from finetune.runtime import seeds
from finetune.runtime.parallel import SampleLengths
from tests.devices import EVERY_DEVICE, ON_GPU
from tests.model.attention.flash_on_cpu import flash_on_cpu, reference_attention

DTYPES = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4}
"""The largest error relative to the largest value, by the dtype of queries, keys and values."""


@pytest.fixture(autouse=True)
def memory():
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def inputs(lengths, *, heads, key_heads, width, dtype, device, seed=0):
    """Return queries, keys and values of a row as transformers lays them out, [1, heads, tokens, width]."""
    draw, tokens = torch.Generator(device).manual_seed(seed), sum(lengths)
    shapes = [(1, tokens, number, width) for number in (heads, key_heads, key_heads)]
    rows = (torch.randn(shape, generator=draw, device=device) for shape in shapes)
    return [row.to(dtype).transpose(1, 2).detach().requires_grad_() for row in rows]


def ours(qkv, lengths, *, window=None, scale=None, gradient=None):
    """Return the output of our attention, [tokens, heads, width], and the gradients."""
    edges = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=qkv[0].device)
    output, _ = per_sample_attention(
        torch.nn.Identity(),
        *qkv,
        None,
        scaling=scale,
        sliding_window=window,
        sample_lengths=SampleLengths(lengths),
        cu_seq_lens_q=edges,
        cu_seq_lens_k=edges,
        max_length_q=max(lengths),
        max_length_k=max(lengths),
    )
    found = torch.autograd.grad(output, qkv, (gradient if gradient is not None else torch.ones_like(output[0]))[None])
    return output[0], found


def reference(qkv, lengths, *, window=None, scale=None, gradient):
    """Return output and gradients in float32, computed sample by sample."""
    exact = [tensor.detach().float().requires_grad_() for tensor in qkv]
    rows = [each[0].transpose(0, 1) for each in exact]
    output = reference_attention(*rows, [0, *accumulate(lengths)], scale=scale, window=window)
    return output, torch.autograd.grad(output, exact, gradient.float())


def error(found: Tensor, exact: Tensor) -> float:
    return ((found.float() - exact).abs().max() / exact.abs().max()).item()


@contextmanager
def kernels(device):
    """Use torch's own kernel on a GPU, and its reference implementation on a CPU."""
    if device == "cpu":
        with flash_on_cpu() as counted:
            yield counted
        return
    detect_kernels()
    before = sample_attention._available
    sample_attention._available = AvailableKernels(
        before.is_capable, None, before.torch_varlen, supports_gqa=before.supports_gqa
    )
    assert before.torch_varlen is not None
    yield None
    sample_attention._available = before


def lengths_on(device):
    return [(1, 7, 4096), (1,) * 16, (4096,)] if device == "cuda" else [(1, 7, 64), (1,) * 4, (64,)]


@EVERY_DEVICE
def test_values_narrower_than_keys_are_widened_for_the_kernel(device):
    lengths, dtype = lengths_on(device)[0], torch.bfloat16
    query, key, value = inputs(lengths, heads=4, key_heads=4, width=96, dtype=dtype, device=device)
    narrow = value[..., :64].detach().requires_grad_()
    gradient = torch.randn_like(narrow[0].transpose(0, 1))
    with kernels(device) as counted:
        output, (_, _, of_values) = ours((query, key, narrow), lengths, gradient=gradient)
    assert counted is None or counted.calls["forward"] == 1
    exact, (_, _, exact_of_values) = reference((query, key, narrow), lengths, gradient=gradient)
    assert output.shape == exact.shape
    assert error(output, exact) < DTYPES[dtype]
    assert error(of_values, exact_of_values) < DTYPES[dtype]


def test_no_kernel_is_given_attention_sinks():
    qkv = QueryKeyValue(*inputs((5, 7), heads=4, key_heads=4, width=64, dtype=torch.bfloat16, device="cpu"))
    with flash_on_cpu():
        assert varlen_kernel(qkv, AttentionSettings()) is not None
        assert varlen_kernel(qkv, AttentionSettings(sinks=torch.zeros(4))) is None


@EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("key_heads", [1, 8])
def test_the_kernel_computes_each_samples_attention(device, dtype, width, key_heads, figure):
    worst = 0.0
    with kernels(device) as counted:
        for lengths in lengths_on(device):
            for window in (None, 5, 1000):
                sizes = {"heads": 8, "key_heads": key_heads, "width": width, "dtype": dtype, "device": device}
                qkv = inputs(lengths, **sizes)
                assert varlen_kernel(QueryKeyValue(*qkv), AttentionSettings(window=window)) is not None
                gradient = torch.randn_like(qkv[0][0].transpose(0, 1))
                output, gradients = ours(qkv, lengths, window=window, gradient=gradient)
                exact, exact_gradients = reference(qkv, lengths, window=window, gradient=gradient)
                pairs = zip((output, *gradients), (exact, *exact_gradients), strict=True)
                worst = max([worst, *(error(one, other) for one, other in pairs if other.abs().max() > 0)])
    assert counted is None or counted.calls == {"forward": 9, "backward": 9}
    name = str(dtype).removeprefix("torch.")
    figure(
        f"error of packed attention, {name}, width {width}, {8 // key_heads}:1 ({device})", worst, at_most=DTYPES[dtype]
    )


@EVERY_DEVICE
@pytest.mark.parametrize("window", [None, 5])
def test_without_a_kernel_each_samples_attention_is_the_same(device, window, figure):
    """No varlen kernel supports float32."""
    lengths = (1, 7, 300)
    sizes = {"heads": 8, "key_heads": 1, "width": 64, "dtype": torch.float32, "device": device}
    qkv = inputs(lengths, **sizes)
    assert varlen_kernel(QueryKeyValue(*qkv), AttentionSettings(window=window)) is None
    gradient = torch.randn_like(qkv[0][0].transpose(0, 1))
    output, gradients = ours(qkv, lengths, window=window, gradient=gradient)
    exact, exact_gradients = reference(qkv, lengths, window=window, gradient=gradient)
    worst = max(error(*each) for each in zip((output, *gradients), (exact, *exact_gradients), strict=True))
    figure(f"error of attention by sample, window {window} ({device})", worst, at_most=1e-4)


@EVERY_DEVICE
def test_per_sample_attention_synchronizes_nothing(device):
    """The lengths are on the host, so nothing is read from the device."""
    lengths = lengths_on(device)[0]
    sizes = {"heads": 8, "key_heads": 1, "width": 64, "dtype": torch.bfloat16, "device": device}
    qkv = inputs(lengths, **sizes)
    with kernels(device):
        if device == "cuda":
            ours(qkv, lengths)
            torch.cuda.set_sync_debug_mode("error")
        edges = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=device == "cuda")
        kernel = varlen_kernel(QueryKeyValue(*qkv), AttentionSettings())
        try:
            output = kernel(QueryKeyValue(*qkv), edges, max(lengths), AttentionSettings())
            output.sum().backward()
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    assert output.shape == (1, sum(lengths), 8, 64)


@pytest.fixture
def deterministic(monkeypatch):
    """Set the switches of a deterministic run, and restore them after the test."""
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "0")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    benchmark = torch.backends.cudnn.benchmark
    seeds.use_deterministic_kernels()
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark


def flash_package():
    """Return a stand-in for the package `flash_attn` and the recorded arguments of its function."""
    calls = []
    package = ModuleType("flash_attn")

    def attend(query, *_, **named):
        calls.append(named)
        return query

    package.flash_attn_varlen_func = attend
    return SimpleNamespace(package=package, calls=calls)


def test_a_package_without_the_kernel_is_not_used(monkeypatch):
    """`flash-attn-4` alone leaves a folder `flash_attn` without the function of flash-attn 2."""
    flash = flash_package()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(sample_attention, "_available", AvailableKernels())
    for package in (flash.package, ModuleType("flash_attn")):
        found = {"flash_attn": package}
        monkeypatch.setattr(sample_attention, "_import_if_installed", found.get)
        detect_kernels()
        assert sample_attention._available.flash is (package if package is flash.package else None)


@pytest.mark.parametrize("is_asked", [False, True])
def test_flash_attention_is_asked_for_a_deterministic_backward_pass(monkeypatch, request, is_asked):
    if is_asked:
        request.getfixturevalue("deterministic")
    flash = flash_package()
    available = AvailableKernels(True, flash.package, device_type="cpu", is_flash_repeatable=True)
    monkeypatch.setattr(sample_attention, "_available", available)
    qkv = inputs((3, 4), heads=2, key_heads=2, width=8, dtype=torch.bfloat16, device="cpu")
    kernel = varlen_kernel(QueryKeyValue(*qkv), AttentionSettings())
    kernel(QueryKeyValue(*qkv), torch.tensor([0, 3, 7]).int(), 4, AttentionSettings())
    assert flash.calls[-1].get("deterministic", False) is is_asked


@pytest.mark.usefixtures("deterministic")
def test_an_old_flash_attention_that_cannot_repeat_itself_is_not_used_in_a_deterministic_run(monkeypatch):
    flash = flash_package()
    available = AvailableKernels(True, flash.package, torch.add, device_type="cpu", is_flash_repeatable=False)
    monkeypatch.setattr(sample_attention, "_available", available)
    qkv = QueryKeyValue(*inputs((3,), heads=2, key_heads=2, width=8, dtype=torch.bfloat16, device="cpu"))
    assert varlen_kernel(qkv, AttentionSettings()) is sample_attention._torch_varlen
    torch.use_deterministic_algorithms(False)
    assert varlen_kernel(qkv, AttentionSettings()) is sample_attention._flash_varlen


class TestOnGpu:
    """Results are bitwise equal."""

    pytestmark = ON_GPU

    @pytest.mark.usefixtures("deterministic")
    def test_a_deterministic_run_repeats_gradients_bit_for_bit(self):
        lengths = (1, 7, 4096, 2048)
        sizes = {"heads": 16, "key_heads": 2, "width": 128, "dtype": torch.bfloat16, "device": "cuda"}
        qkv = inputs(lengths, **sizes)
        with kernels("cuda"):
            (_, first), (_, again) = ours(qkv, lengths), ours(qkv, lengths)
        assert all(map(torch.equal, first, again))
