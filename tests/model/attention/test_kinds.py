"""Every kind of model that is said to keep samples apart does, and others are not said to."""

import pytest
import torch

from finetune.model.attention.choice import attention_implementation, best_attention
from finetune.model.attention.kinds import KEEPING_APART, keeps_samples_apart
from tests.model.attention.small_models import LENGTHS, row_of, tiny_config, tiny_model, tokens


@torch.no_grad()
@pytest.mark.parametrize("kind", sorted(KEEPING_APART))
def test_a_sample_in_a_row_is_the_sample_alone_under_eager_attention(kind):
    alone, together = tiny_model(kind, "eager"), tiny_model(kind)
    samples = [tokens(length, salt) for salt, length in enumerate(LENGTHS)]
    expected = torch.cat([alone(input_ids=each, use_cache=False).logits for each in samples], dim=1)
    logits = together(**row_of(samples)).logits
    assert ((logits - expected).abs().max() / expected.abs().max()).item() < 1e-5
    assert keeps_samples_apart(together.config)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}),
        ("llama4_text", {}),
        ("bert", {}),
        ("t5", {}),
        ("qwen3_moe", {"output_router_logits": True}),
        ("gpt2", {"add_cross_attention": True}),
        ("stablelm", {}),
    ],
)
def test_others_keep_the_attention_that_transformers_gives_them(kind, values):
    assert best_attention(tiny_config(kind, **values)) is None


def test_code_that_comes_with_a_model_is_not_trusted_to_keep_them_apart():
    own = type(tiny_config("llama"))
    brought = type("BroughtConfig", (own,), {"__module__": "transformers_modules.someone.configuration_llama"})
    assert not keeps_samples_apart(brought())


def test_auto_gives_known_models_our_attention_and_what_is_written_stays():
    assert best_attention(tiny_config("llama")) == "per_sample"
    assert attention_implementation("auto") is None
    assert attention_implementation("sdpa") == "sdpa"
