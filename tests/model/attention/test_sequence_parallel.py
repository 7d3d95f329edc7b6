"""Heads are divided among ranks as the model groups them; models that are inexact in slices are rejected by name."""

import pytest
import torch

from finetune.errors import StrategyError
from finetune.model.attention import implementation
from finetune.model.attention.implementation import (
    attend_slices,
    require_divisible_heads,
    require_equal_logits,
    slicing_problem,
)
from finetune.model.attention.sample_attention import AttentionSettings, QueryKeyValue
from finetune.model.attention.supported_models import PLAIN_MODEL_TYPES, SINK_MODEL_TYPES
from finetune.runtime.distributed import RankGroup
from tests.model.attention.small_models import tiny_config
from tests.refusals import refused

WIDTH, VALUE_WIDTH, TOKENS = 3, 2, 2


class Ranks:
    """Simulates ranks in one process, run in turn until each has received the others' data."""

    def __init__(self, monkeypatch, size):
        self._size, self._sent, self._place = size, {}, 0
        monkeypatch.setattr(implementation, "sequence_group", lambda: RankGroup(size, self._place))
        monkeypatch.setattr(implementation, "swap_blocks", self._swap)

    def _swap(self, blocks):
        self._sent[self._place, self._call] = blocks
        self._call += 1
        others = [self._sent.get((rank, self._call - 1)) for rank in range(self._size)]
        if any(each is None for each in others):
            return torch.zeros_like(blocks)
        return torch.stack([each[self._place] for each in others])

    def run(self, function):
        for _ in range(3):
            found = []
            for place in range(self._size):
                self._place, self._call = place, 0
                found.append(function(place))
        return found


SHARED = [
    (queries, keys, size)
    for queries in range(1, 17)
    for keys in range(1, queries + 1)
    for size in range(2, queries + 1)
    if queries % keys == 0 and queries % size == 0
]


def attention(qkv, settings):
    """Return a function of every token's query, the keys and values of its own head, and its sink."""
    query, key, value = qkv.repeated
    assert query.shape[1] == key.shape[1]
    scores = query @ key.transpose(2, 3)
    sinks = 0 if settings.sinks is None else settings.sinks[None, :, None, None]
    return ((scores + sinks) @ value).transpose(1, 2)


def test_every_number_of_heads_key_heads_and_ranks_is_shared_as_the_model_groups_them(monkeypatch):
    assert len(SHARED) > 60
    for queries, keys, size in SHARED:
        shapes = ((queries, WIDTH), (keys, WIDTH), (keys, VALUE_WIDTH))
        whole = QueryKeyValue(*(torch.randn(1, heads, size * TOKENS, width) for heads, width in shapes))
        settings = AttentionSettings(sinks=torch.randn(queries))
        parts = [QueryKeyValue(*(each.chunk(size, dim=2)[place] for each in whole)) for place in range(size)]
        found = Ranks(monkeypatch, size).run(lambda place: attend_slices(parts[place], settings, attention))  # noqa: B023
        assert all(each.is_contiguous() for each in found)
        assert torch.cat(found, dim=1).allclose(attention(whole, settings), atol=1e-5), (queries, keys, size)


def test_queries_in_a_wider_dtype_are_exchanged_on_their_own(monkeypatch):
    whole = QueryKeyValue(torch.randn(1, 4, 4, 3).double(), torch.randn(1, 2, 4, 3).double(), torch.randn(1, 2, 4, 3))
    parts = [QueryKeyValue(*(each.chunk(2, dim=2)[place] for each in whole)) for place in range(2)]

    def attend(qkv, settings):
        assert [tensor.dtype for tensor in qkv] == [torch.float64, torch.float64, torch.float32]
        return attention(qkv._replace(value=qkv.value.double()), settings)

    found = Ranks(monkeypatch, 2).run(lambda place: attend_slices(parts[place], AttentionSettings(), attend))
    assert torch.cat(found, dim=1).allclose(attend(whole, AttentionSettings()))


def test_heads_that_ranks_cannot_share_are_refused_with_the_degrees_that_work():
    with refused(StrategyError, "5 ranks", "12 attention heads", "1, 2, 3, 4, 6, 12"):
        require_divisible_heads(12, 5)


@pytest.mark.parametrize("kind", sorted(PLAIN_MODEL_TYPES | SINK_MODEL_TYPES))
def test_models_whose_layers_mix_tokens_in_attention_alone_are_shared(kind):
    assert slicing_problem(tiny_config(kind), 2) is None


@pytest.mark.parametrize("kind", ["llama4_text", "lfm2", "mamba2", "qwen3_next", "bert", "bloom", "jamba", "t5"])
def test_other_models_are_refused_by_name(kind):
    assert f"`{kind}`" in slicing_problem(tiny_config(kind), 2)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_whole_row_are_refused(kind):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    rope |= {"long_factor": [1.0] * 4, "short_factor": [1.0] * 4, "original_max_position_embeddings": 32}
    config = tiny_config("llama")
    config.rope_parameters = rope
    assert f"`{kind}` rotary positions" in slicing_problem(config, 2)
    config.rope_parameters = {"full_attention": rope, "sliding_attention": {"rope_type": "default"}}
    assert f"`{kind}` rotary positions" in slicing_problem(config, 2)


def test_other_logits_than_those_of_the_whole_row_are_refused():
    whole = torch.randn(7, 5)
    require_equal_logits(whole, whole + 1e-6, config=tiny_config("llama"), size=2)
    for other in (whole + 1e-2, whole * torch.nan):
        with refused(StrategyError, "`llama`", varies=True):
            require_equal_logits(whole, other, config=tiny_config("llama"), size=2)
