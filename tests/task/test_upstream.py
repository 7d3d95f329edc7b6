"""Each workaround is still needed: where a test fails, the library has mended it and the workaround can go."""

import inspect

import pytest
import torch
from torch import nn

from finetune.runtime import distributed
from finetune.task.upstream import throttle_generate_sync, through_wrappers


class Wrapper(nn.Module):
    """Counts the forward passes that go through it."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.num_forwards = 0

    def forward(self, **inputs):
        self.num_forwards += 1
        return self.module(**inputs)


def test_generate_bypasses_the_wrappers_of_its_model(model):
    wrapped, inputs = Wrapper(model), {"input_ids": torch.tensor([[5, 17]]), "max_new_tokens": 3, "do_sample": False}
    plain = model.generate(**inputs, eos_token_id=None)
    assert wrapped.num_forwards == 0
    with through_wrappers(wrapped, model):
        assert torch.equal(model.generate(**inputs, eos_token_id=None), plain)
    assert wrapped.num_forwards == 3
    assert "forward" not in vars(model)


@pytest.mark.parametrize(("tokens_of_others", "num_questions"), [(5, 1), (8, 1), (13, 2), (40, 2)])
def test_ranks_that_generate_ask_every_8_tokens_whether_all_are_done(
    model, monkeypatch, tokens_of_others, num_questions
):
    """At most 20 tokens are generated; the longest answer of another rank has `tokens_of_others`."""
    questions, num_forwards, forward = [], 0, model.forward

    def counted(*values, **named):
        nonlocal num_forwards
        num_forwards += 1
        return forward(*values, **named)

    def sum_counts(counts):
        questions.append(num_forwards)
        return [int(num_forwards < tokens_of_others)]

    monkeypatch.setattr(model, "forward", counted)
    monkeypatch.setattr(distributed, "sum_counts", sum_counts)
    inputs = {"input_ids": torch.tensor([[5, 17]]), "max_new_tokens": 20, "do_sample": False}
    plain = model.generate(**inputs, eos_token_id=None)
    first = int(plain[0, 2])
    num_forwards = 0
    with throttle_generate_sync(model, max_new_tokens=20):
        done_at_once = model.generate(**inputs, eos_token_id=first, pad_token_id=0, synced_gpus=True)
    assert done_at_once[0, 2:].tolist() == [first], "what is computed while others go on is dropped"
    assert questions == [8, 16][:num_questions]
    assert num_forwards == min(8 * -(-tokens_of_others // 8), 20), "as many passes as any other rank"
    assert "_has_unfinished_sequences" not in vars(model)


def test_transformers_still_asks_before_every_token_on_the_device(model):
    source = inspect.getsource(type(model)._has_unfinished_sequences)
    assert "dist.all_reduce" in source
    assert ".item()" in source
    assert list(inspect.signature(type(model)._has_unfinished_sequences).parameters)[1:] == [
        *("this_peer_finished", "synced_gpus", "device")
    ]
