"""Greedy answers equal those of transformers, with and without a cache, and ranks keep in step."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from finetune.task.generation.decoding import generate

PROMPTS = [(5, 17, 200, 31), (7,), (90, 91, 92, 93, 94, 95, 96, 97)]
PAD = 0


def answer(model, prompts=PROMPTS, *, stop_ids=frozenset(), max_new_tokens=12, all_finished=bool):
    return generate(
        model,
        prompts,
        pad_id=PAD,
        stop_ids=frozenset(stop_ids),
        max_new_tokens=max_new_tokens,
        device=torch.device("cpu"),
        all_finished=all_finished,
    )


def theirs(model, prompt, *, max_new_tokens=12, eos=None):
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": max_new_tokens, "eos_token_id": eos, "pad_token_id": PAD}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return out[0, len(prompt) :].tolist()


def test_answers_are_those_of_transformers(model):
    ours = answer(model)
    assert ours == [theirs(model, prompt) for prompt in PROMPTS]
    assert len({token for row in ours for token in row}) > 5


def test_an_answer_ends_with_its_stop_token(model):
    free = answer(model)
    stop = free[0][3]
    assert answer(model, stop_ids={stop}) == [theirs(model, prompt, eos=stop) for prompt in PROMPTS]
    assert answer(model, PROMPTS[:1], stop_ids={stop})[0] == free[0][: free[0].index(stop) + 1]


class Wrapper(nn.Module):
    """Hides the cache, as a model without one would, inside a wrapper such as DDP has."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.lengths = []

    def forward(self, *args, **kwargs):
        self.lengths.append(kwargs["input_ids"].shape[1])
        return SimpleNamespace(logits=self.module(*args, **kwargs).logits)


def test_without_a_cache_the_whole_text_is_read_again(model):
    wrapped = Wrapper(model)
    assert answer(wrapped) == answer(model)
    assert wrapped.lengths == list(range(8, 20))


def test_every_rank_goes_on_until_all_have_finished(model):
    stop = answer(model, PROMPTS[:1])[0][0]
    local, forwards = [], Wrapper(model)

    def others_take_five(is_finished):
        local.append(is_finished)
        return is_finished and len(local) >= 5

    assert answer(forwards, PROMPTS[:1], stop_ids={stop}, all_finished=others_take_five) == [[stop]]
    assert local == [True] * 5
    assert len(forwards.lengths) == 5


def test_a_rank_without_prompts_takes_part_and_answers_nothing(model):
    forwards = Wrapper(model)
    steps = iter([False, False, True])
    assert answer(forwards, [], all_finished=lambda is_finished: is_finished and next(steps)) == []
    assert len(forwards.lengths) == 3


@pytest.mark.parametrize("max_new_tokens", [0, 1])
def test_the_limit_is_kept(model, max_new_tokens):
    assert [len(row) for row in answer(model, max_new_tokens=max_new_tokens)] == [max_new_tokens] * 3
