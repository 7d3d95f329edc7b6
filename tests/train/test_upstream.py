"""Each workaround is still needed; when a test fails, the library has fixed the bug."""

import importlib.util

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from finetune.train.upstream import supports_found_inf, without_accelerate_wrapper

CPU = torch.device("cpu")


def test_accelerates_wrapper_searches_the_disk_at_every_step(monkeypatch):
    weight = torch.nn.Parameter(torch.ones(2))
    own = torch.optim.SGD([weight], lr=0.1)
    Accelerator(cpu=True)
    wrapped, searched, find_spec = AcceleratedOptimizer(own), [], importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: searched.append(name) or find_spec(name, *a))
    wrapped.step()
    assert "lomo_optim" in searched
    assert without_accelerate_wrapper(wrapped) is own
    assert without_accelerate_wrapper(own) is own


def test_fused_sgd_keeps_the_momentum_of_a_step_that_was_skipped():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
    weight.grad = torch.full_like(weight, torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert weight.tolist() == [1.0, 1.0]
    assert optimizer.state[weight]["momentum_buffer"] is not None  # of a step that has not happened
    assert not supports_found_inf(optimizer, device=CPU)
    assert supports_found_inf(torch.optim.AdamW([weight], fused=True), device=CPU)
    assert not supports_found_inf(torch.optim.AdamW([weight], fused=False), device=CPU)
