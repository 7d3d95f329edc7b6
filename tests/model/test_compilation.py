"""Compiled layers give the numbers of the code as it is written, once per kind of layer, or step aside."""

import numpy as np
import pytest
import torch
from torch import nn

from finetune.data.features import Features
from finetune.model import compilation
from finetune.model.adapters.build import add_adapter
from finetune.model.adapters.context import AdapterContext, adapter_config
from finetune.model.compilation import compile_model, repeated_layers
from finetune.runtime.parameters import InitContext
from finetune.task.lm_loss.at_targets import logits_at_targets
from finetune.task.model_inputs import collate_padding_free, unwrap_model

SHAPES = [(2, 16), (2, 24), (2, 40), (4, 9), (1, 9), (1, 30), (3, 17), (2, 16)]
LORA = {"rank": 4, "dropout": 0.1}


@pytest.fixture(autouse=True)
def traces(monkeypatch):
    """Trace without a compiler, from nothing; what a test has compiled is forgotten after it."""
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    settings = torch._dynamo.config
    before = settings.recompile_limit, settings.fail_on_recompile_limit_hit
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    settings.recompile_limit, settings.fail_on_recompile_limit_hit = before


@pytest.fixture
def model(build, from_config):
    """Return a function that builds a small model; the same values each time."""

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


def learnt(model, *, shapes=SHAPES):
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
def test_compiled_it_learns_the_same(model, how, wish):
    plain, quick = model(**wish), model(**wish)
    names = list(quick.state_dict())
    compile_model(unwrap_model(quick), how, log=lambda _: None)
    assert list(quick.state_dict()) == names
    before = num_graphs()
    assert_alike(learnt(quick, shapes=SHAPES[:1]), learnt(plain, shapes=SHAPES[:1]))
    assert num_graphs() > before


@pytest.mark.full
def test_equal_layers_are_compiled_once_and_lengths_that_vary_a_few_times(model, monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", "eager")
    quick, counts = model("qwen3 tied"), []
    assert len(list(repeated_layers(quick))) == 2
    compile_model(quick, "regional", log=lambda _: None)
    before = num_graphs()
    for shape in SHAPES:
        learnt(quick, shapes=[shape])
        counts.append(num_graphs() - before)
    # the first shape; any length; any number of rows; one row alone
    assert counts == [1, 2, 2, 3, 4, 4, 4, 4]


@pytest.mark.full
def test_rows_of_samples_are_compiled_once_whatever_stands_in_them(model, monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", "eager")
    plain, quick, counts = model("qwen3 tied"), model("qwen3 tied"), []
    compile_model(quick, "regional", log=lambda _: None)
    for lengths in [(5,), (9, 3), (4, 4, 7), (6, 2, 2, 8), (3, 9), (7, 5, 4)]:
        row = collate_padding_free([sample(length, number) for number, length in enumerate(lengths)])
        losses = []
        for each in (plain, quick):
            logits = logits_at_targets(each, row)
            losses.append(nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long)))
            losses[-1].backward()
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
        counts.append(num_graphs())
    assert len(set(counts[1:])) == 1, counts


def sample(length, number):
    ids = np.arange(length, dtype=np.int64) + number
    return Features({"input_ids": ids, "is_target": np.ones(length, dtype=bool)}, sample_id=number)


def test_an_evaluation_runs_the_code_as_it_is_written(model):
    quick = model()
    compile_model(quick, "regional", log=lambda _: None)
    before, ids = num_graphs(), torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(quick(input_ids=ids).logits, model()(input_ids=ids).logits)
    assert quick.eval().generate(input_ids=ids, max_new_tokens=3, do_sample=False).shape == (1, 15)
    assert num_graphs() == before


def test_when_the_compiler_fails_training_goes_on_without_it(model, monkeypatch):
    def broken(graph, inputs):
        raise OSError("no room for kernels")

    monkeypatch.setattr(compilation, "BACKEND", broken)
    plain, quick, said = model(), model(), []
    compile_model(quick, "regional", log=said.append)
    assert_alike(learnt(quick, shapes=SHAPES[:2]), learnt(plain, shapes=SHAPES[:2]))
    warnings = [line for line in said if line.startswith("warning")]
    assert len(warnings) == 1
    assert "no room for kernels" in warnings[0]


def test_too_many_variants_are_told_and_given_up(model, monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", "eager")
    monkeypatch.setattr(compilation, "RECOMPILE_LIMIT", 1)
    plain, quick, said = model(), model(), []
    compile_model(quick, "regional", log=said.append)
    assert_alike(learnt(quick), learnt(plain))
    assert any("FailOnRecompileLimitHit" in line for line in said)


def test_without_a_compiler_nothing_is_compiled_and_that_is_told(model, monkeypatch):
    monkeypatch.setattr(compilation, "why_not_compilable", lambda: "there is no compiler")
    quick, said = model(), []
    compile_model(quick, "regional", log=said.append)
    assert said == ["warning: model.compile: regional was requested, but nothing is compiled: there is no compiler."]
    assert all("forward" not in vars(module) for module in quick.modules())


def test_the_compiler_is_looked_for(monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", "inductor")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "/nowhere/g++"))
    assert "/nowhere/g++" in compilation.why_not_compilable()


def test_a_model_without_repeated_layers_has_nothing_to_compile():
    assert list(repeated_layers(nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])))) == []


@pytest.mark.slow  # a minute for the C++ compiler
@pytest.mark.parametrize("how", ["regional", "full"])
def test_the_compiled_kernels_learn_the_same(model, monkeypatch, how):
    monkeypatch.setattr(compilation, "BACKEND", "inductor")
    plain, quick = model(lora=LORA), model(lora=LORA)
    compile_model(unwrap_model(quick), how, log=lambda _: None)
    assert_alike(learnt(quick, shapes=SHAPES[:3]), learnt(plain, shapes=SHAPES[:3]))
