"""Compiled layers equal uncompiled ones, compile once per type of layer, and fall back after a failure."""

import gc
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from finetune.model.activations import enable_gradient_checkpointing
from finetune.model.adapters.build import add_adapter
from finetune.model.adapters.context import AdapterContext, adapter_config
from finetune.model.kernels import compilation
from finetune.model.kernels.compilation import compile_model
from finetune.runtime.parameters import InitContext
from finetune.task.model_inputs import unwrap_model
from tests.devices import ON_GPU
from tests.model.attention.flash_on_cpu import flash_on_cpu
from tests.model.attention.small_models import row_of, tiny_model, tokens

SHAPES = [(2, 16), (2, 24), (2, 40), (4, 9), (1, 9), (1, 30), (3, 17), (2, 16)]
LORA = {"rank": 4, "dropout": 0.1}


@pytest.fixture(autouse=True)
def traces(monkeypatch):
    """Trace without a compiler, with empty caches, which are cleared after the test."""
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    settings = torch._dynamo.config
    before = settings.recompile_limit, settings.fail_on_recompile_limit_hit
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    settings.recompile_limit, settings.fail_on_recompile_limit_hit = before


@pytest.fixture
def model(build, from_config):
    """Return a function that builds a small model with the same values every time."""

    def make(name="llama untied", *, lora=None, **keys):
        section = from_config(name, **keys, **({"lora": lora} if lora else {}))
        plain = build(section)
        wish = adapter_config(section)
        if wish is None:
            return plain
        ground = AdapterContext(seed=7, head="causal_lm", revision=None, init_context=InitContext())
        adapted = add_adapter(plain, wish, ground)
        with torch.no_grad():
            for number, weight in enumerate(p for p in adapted.parameters() if p.requires_grad):
                weight.normal_(std=0.1, generator=torch.Generator().manual_seed(number))
        return adapted

    return make


def losses_and_gradients(model, *, shapes=SHAPES):
    """Return the loss and all gradients of one batch of each shape."""
    found = []
    for number, shape in enumerate(shapes):
        torch.manual_seed(number)
        ids = torch.randint(0, 300, shape)
        mask = torch.ones_like(ids)
        mask[0, -3:] = shape[0] == 1
        model.zero_grad()
        loss = model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
        loss.backward()
        found.append((loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    return found


def num_graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def assert_alike(one, other):
    assert len(one) == len(other) > 0
    for (loss, gradients), (expected, expected_gradients) in zip(one, other, strict=True):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert len(gradients) == len(expected_gradients) > 0
        for gradient, like in zip(gradients, expected_gradients, strict=True):
            assert torch.allclose(gradient, like, rtol=1e-5, atol=1e-6)


CASES = [
    ("regional", {"lora": LORA, "gradient_checkpointing": True}),
    ("regional", {"name": "gpt2 tied", "gradient_checkpointing": "selective"}),
    pytest.param("full", {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("how", "wish"), CASES)
def test_a_compiled_model_trains_like_the_plain_one(model, how, wish):
    plain, quick = model(**wish), model(**wish)
    names = list(quick.state_dict())
    compile_model(unwrap_model(quick), how, log=lambda _: None)
    assert list(quick.state_dict()) == names
    before = num_graphs()
    assert_alike(losses_and_gradients(quick, shapes=SHAPES[:1]), losses_and_gradients(plain, shapes=SHAPES[:1]))
    assert num_graphs() > before


def test_evaluation_runs_uncompiled(model):
    quick = model()
    compile_model(quick, "regional", log=lambda _: None)
    before, ids = num_graphs(), torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(quick(input_ids=ids).logits, model()(input_ids=ids).logits)
    assert quick.eval().generate(input_ids=ids, max_new_tokens=3, do_sample=False).shape == (1, 15)
    assert num_graphs() == before


def test_training_continues_uncompiled_after_a_compiler_failure(model, monkeypatch):
    def broken(graph, inputs):
        raise OSError("no room for kernels")

    monkeypatch.setattr(compilation, "BACKEND", broken)
    plain, quick, messages = model(), model(), []
    compile_model(quick, "regional", log=messages.append)
    assert_alike(losses_and_gradients(quick, shapes=SHAPES[:2]), losses_and_gradients(plain, shapes=SHAPES[:2]))
    warnings = [line for line in messages if line.startswith("warning")]
    assert len(warnings) == 1
    assert "no room for kernels" in warnings[0]


def test_too_many_compiled_variants_are_warned_about_and_compilation_stops(model, monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", "eager")
    monkeypatch.setattr(compilation, "RECOMPILE_LIMIT", 1)
    plain, quick, messages = model(), model(), []
    compile_model(quick, "regional", log=messages.append)
    assert_alike(losses_and_gradients(quick), losses_and_gradients(plain))
    assert any("FailOnRecompileLimitHit" in line for line in messages)


def test_a_missing_compiler_is_warned_about_and_nothing_is_compiled(model, monkeypatch):
    monkeypatch.setattr(compilation, "why_not_compilable", lambda: "there is no compiler")
    quick, messages = model(), []
    compile_model(quick, "regional", log=messages.append)
    assert messages == [
        "warning: model.compile: regional was requested, but nothing is compiled: there is no compiler."
    ]
    assert all("forward" not in vars(module) for module in quick.modules())


def test_a_missing_c_compiler_is_detected(monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", "inductor")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "/nowhere/g++"))
    assert "/nowhere/g++" in compilation.why_not_compilable()


LENGTHS = [(5, 9, 1), (3, 3), (12,), (1, 2, 3, 4, 5)]
"""Of the samples of successive batches."""


def sized(device, lora, mode=False):
    """Return a model sized for the device, with our attention, for training."""
    sizes = {"head_dim": 8}
    if device == "cuda":
        sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "head_dim": 128}
        sizes |= {"num_hidden_layers": 4, "num_key_value_heads": 4, "max_position_embeddings": 8192}
    model = tiny_model("llama", **sizes).train()
    if mode:
        enable_gradient_checkpointing(model, mode)
    if lora:
        torch.manual_seed(1)
        how = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, how, autocast_adapter_dtype=False)
    return model.to(device)


def batch_of(lengths, *, is_packed, device):
    times = 256 if device == "cuda" else 1
    lengths = [length * times for length in lengths]
    if is_packed:
        row = row_of([tokens(length, salt) for salt, length in enumerate(lengths)])
        edges, longest = torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths)
        named = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": longest, "max_length_k": longest}
        given = {**row, **named}
    else:
        given = {"input_ids": tokens(max(lengths), 0).repeat(len(lengths), 1), "use_cache": False}
        given["attention_mask"] = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in given.items()}


def step(model, given, device):
    model.zero_grad()
    with torch.autocast(device, torch.bfloat16):
        loss = model(**given).logits.float().logsumexp(-1).mean()
    loss.backward()
    return loss.item()


GRAPHS = [
    ("cpu", True, False, "selective"),
    pytest.param("cpu", True, True, False, marks=pytest.mark.full),
    pytest.param("cpu", False, True, False, marks=pytest.mark.full),
    pytest.param("cuda", True, False, "selective", marks=ON_GPU),
    pytest.param("cuda", True, True, False, marks=ON_GPU),
    pytest.param("cuda", False, True, False, marks=ON_GPU),
]


@pytest.mark.parametrize(("device", "is_packed", "lora", "mode"), GRAPHS)
def test_a_layer_is_one_graph_and_few_variants_serve_all_lengths(device, is_packed, lora, mode, monkeypatch, figure):
    monkeypatch.setattr(compilation, "BACKEND", "inductor" if device == "cuda" else "eager")
    torch._dynamo.utils.counters.clear()
    plain, quick = (sized(device, lora, mode) for _ in range(2))
    with flash_on_cpu() if device == "cpu" and is_packed else nullcontext():
        compile_model(unwrap_model(quick), "regional", log=lambda _: None)
        for lengths in LENGTHS:
            given = batch_of(lengths, is_packed=is_packed, device=device)
            assert step(quick, given, device) == pytest.approx(step(plain, given, device), rel=2e-3)
    breaks = torch._dynamo.utils.counters["graph_break"]
    kind = f"{'packed' if is_packed else 'padded'}, {'LoRA' if lora else 'full'}, checkpointing {mode} ({device})"
    figure(f"graph breaks of compiled layers, {kind}", sum(breaks.values()), at_most=0)
    figure(f"compiled variants of a layer, {kind}", num_graphs(), at_most=8, at_least=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_layers_are_faster_on_a_gpu(monkeypatch, figure):
    monkeypatch.setattr(compilation, "BACKEND", "inductor")
    plain, quick = (sized("cuda", lora=False) for _ in range(2))
    compile_model(quick, "regional", log=lambda _: None)
    given = batch_of((12, 12, 8), is_packed=True, device="cuda")  # 8,192 tokens
    milliseconds = {"plain": [], "quick": []}
    for number in range(12):
        for name, each in (("plain", plain), ("quick", quick)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step(each, given, "cuda")
            end.record()
            end.synchronize()
            if number >= 2:
                milliseconds[name].append(start.elapsed_time(end))
    ratio = np.median(np.divide(milliseconds["plain"], milliseconds["quick"]))
    figure("regional compile over eager, speed of a step", float(ratio), at_least=1.1)


@pytest.mark.slow  # a minute for the C++ compiler
@pytest.mark.parametrize("how", ["regional", "full"])
def test_compiled_kernels_train_like_the_plain_ones(model, monkeypatch, how):
    monkeypatch.setattr(compilation, "BACKEND", "inductor")
    plain, quick = model(lora=LORA), model(lora=LORA)
    compile_model(unwrap_model(quick), how, log=lambda _: None)
    assert_alike(losses_and_gradients(quick, shapes=SHAPES[:3]), losses_and_gradients(plain, shapes=SHAPES[:3]))
