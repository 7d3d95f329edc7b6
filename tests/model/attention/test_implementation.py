"""Every model type that is listed as isolating packed samples does so, and others are not listed."""

import json
from itertools import pairwise
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PretrainedConfig

from finetune.data.features import Features
from finetune.errors import ModelError
from finetune.model.attention import sample_attention
from finetune.model.attention.implementation import (
    attend_sample_by_sample,
    check_isolation,
    default_attention,
    requested_attention,
    require_position_ids,
)
from finetune.model.attention.sample_attention import AttentionSettings, QueryKeyValue, causal_attention
from finetune.model.attention.supported_models import PACKING_MODEL_TYPES, needs_flash_attention, padding_reason
from finetune.runtime.parallel import SampleLengths
from finetune.task.model_inputs import collate_padding_free, forward_logits
from tests.model.attention.small_models import LENGTHS, row_of, tiny_config, tiny_model, tokens
from tests.refusals import refused


@torch.no_grad()
@pytest.mark.parametrize("kind", sorted(PACKING_MODEL_TYPES))
def test_a_sample_in_a_row_is_the_sample_alone_under_eager_attention(kind):
    alone, together = tiny_model(kind, "eager"), tiny_model(kind)
    samples = [tokens(length, salt) for salt, length in enumerate(LENGTHS)]
    expected = torch.cat([alone(input_ids=sample, use_cache=False).logits for sample in samples], dim=1)
    logits = together(**row_of(samples)).logits
    assert ((logits - expected).abs().max() / expected.abs().max()).item() < 1e-5
    assert padding_reason(together.config) is None


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("jamba", {}),
        ("bert", {"is_decoder": True}),
        ("mpnet", {}),
        ("deberta-v2", {}),
        ("t5", {}),
        ("qwen3_moe", {"output_router_logits": True}),
        ("gpt2", {"add_cross_attention": True}),
        ("stablelm", {}),
    ],
)
def test_others_keep_the_attention_that_transformers_gives_them(kind, values):
    assert default_attention(tiny_config(kind, **values)) is None


def test_remote_model_code_is_not_trusted_to_isolate_samples():
    own = type(tiny_config("llama"))
    brought = type("BroughtConfig", (own,), {"__module__": "transformers_modules.someone.configuration_llama"})
    assert padding_reason(brought()) is not None


def test_auto_selects_per_sample_attention_for_known_models_and_explicit_choices_stay():
    assert default_attention(tiny_config("llama")) == "per_sample"
    assert requested_attention("auto") is None
    assert requested_attention("sdpa") == "sdpa"


def samples(lengths=LENGTHS):
    return [tokens(length, salt) for salt, length in enumerate(lengths)]


def block_masked(given):
    """Return the row for transformers' own attention, where only positions mark the starts of samples."""
    return {name: given[name] for name in ("input_ids", "position_ids", "use_cache")}


def logits_and_gradients(model, given):
    """Return the logits, and the gradients of all trained parameters."""
    model.zero_grad()
    logits = model(**given).logits
    logits.log_softmax(dim=-1)[..., 5].sum().backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert trained
    return logits.detach(), torch.cat([each.grad.flatten() for each in trained])


def assert_equal(one, other):
    for mine, theirs in zip(one, other, strict=True):
        assert ((mine - theirs).norm() / theirs.norm()).item() < 1e-5


def test_softcapped_attention_equals_eager_attention_with_a_block_mask():
    given, caps = row_of(samples()), {"attn_logit_softcapping": 2.0}
    ours, eager = tiny_model("gemma2", **caps), tiny_model("gemma2", "eager", **caps)
    assert_equal(logits_and_gradients(ours, given), logits_and_gradients(eager, block_masked(given)))


def test_samples_of_one_length_are_one_call_with_the_same_numbers():
    given = row_of(samples((9, 9, 9, 9)))
    assert_equal(
        logits_and_gradients(tiny_model("mistral"), given),
        logits_and_gradients(tiny_model("mistral", "sdpa"), block_masked(given)),
    )


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_recomputed_layers_get_the_sample_lengths_again(is_reentrant):
    plain, recomputing = tiny_model("llama"), tiny_model("llama")
    settings = {"use_reentrant": is_reentrant}
    recomputing.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    given = row_of(samples())
    assert_equal(logits_and_gradients(recomputing, given), logits_and_gradients(plain, given))


class Largest(TorchDispatchMode):
    """Records the largest number of elements in a tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, torch.Tensor):
                self.numel = max(self.numel, each.numel())
        return result


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_per_sample_attention_allocates_nothing_quadratic_in_the_row_length(kind):
    given = row_of(samples((16, 8) * 20))
    square = given["input_ids"].numel() ** 2
    seen = {}
    for attention, inputs in (("per_sample", given), ("sdpa", block_masked(given))):
        with Largest() as largest:
            tiny_model(kind, attention)(**inputs)
        seen[attention] = largest.numel
    assert seen["per_sample"] < square / 4
    assert seen["sdpa"] >= square


@pytest.mark.parametrize(("kind", "other"), [("llama", "sdpa"), ("gemma2", "eager"), ("mistral", "sdpa")])
def test_outputs_equal_those_of_transformers_own_attention(kind, other):
    ids = torch.cat([tokens(9, 0), tokens(9, 1)])
    mask = torch.ones_like(ids)
    mask[0, :4] = 0  # padded on the left, as prompts are
    settings = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    answers = [tiny_model(kind, name).generate(ids, **settings) for name in ("per_sample", other)]
    assert answers[0].shape[1] > 9
    assert torch.equal(*answers)


def test_no_saved_model_names_our_attention(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    assert "per_sample" not in (tmp_path / "config.json").read_text()
    assert "model_type" in json.loads((tmp_path / "config.json").read_text())


def test_a_model_that_drops_the_sample_lengths_raises_instead_of_computing_wrong_values():
    with refused(ModelError, "StableLmAttention"):
        tiny_model("stablelm")(**row_of(samples()))


def heads(num_heads=4, num_key_heads=2):
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, num, sum(LENGTHS), 8) for num in (num_heads, num_key_heads, num_key_heads)]
    return QueryKeyValue(*(torch.randn(shape, generator=draw) for shape in shapes))


def row_by_row(query, key, value, edges, *, scale, window, softcap=None):
    """Return the expected output of a varlen kernel, [tokens, heads, width]; windows count keys before the query's."""
    window = None if window < 0 else window + 1
    parts = []
    for start, stop in pairwise(edges):
        of_one = QueryKeyValue(*(each[start:stop].transpose(0, 1)[None] for each in (query, key, value)))
        parts.append(causal_attention(of_one, AttentionSettings(scale, 0.0, softcap, window))[0])
    return torch.cat(parts)


@pytest.mark.parametrize("groups_heads", [True, False])
@pytest.mark.parametrize("window", [None, 6])
def test_the_torch_varlen_kernel_gets_the_settings_of_the_layer(monkeypatch, groups_heads, window):
    def torchs(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, **groups):
        assert groups == ({"enable_gqa": True} if groups_heads else {})
        assert (key.shape[1] == query.shape[1]) != groups_heads
        assert (max_q, max_k, window_size[1]) == (17, 17, 0)
        return row_by_row(query, key, value, cu_q.tolist(), scale=scale, window=window_size[0])

    monkeypatch.setattr(
        sample_attention, "_available", sample_attention.AvailableKernels(True, None, torchs, groups_heads)
    )
    scores, edges = AttentionSettings(0.5, window=window), torch.tensor([0, *LENGTHS]).cumsum(0).int()
    output = sample_attention._torch_varlen(heads(), edges, 17, scores)
    torch.testing.assert_close(output, attend_sample_by_sample(heads(), SampleLengths(LENGTHS), scores))


def test_flash_attention_gets_the_settings_of_the_layer(monkeypatch):
    def flash(query, key, value, cu_q, cu_k, max_q, max_k, *, dropout_p, softmax_scale, causal, window_size, softcap):
        assert (dropout_p, causal, window_size[1]) == (0.0, True, 0)
        return row_by_row(
            query, key, value, cu_q.tolist(), scale=softmax_scale, window=window_size[0], softcap=softcap or None
        )

    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func = flash
    monkeypatch.setattr(sample_attention, "_available", sample_attention.AvailableKernels(True, package))
    scores, edges = AttentionSettings(0.5, softcap=2.0, window=6), torch.tensor([0, *LENGTHS]).cumsum(0).int()
    output = sample_attention._flash_varlen(heads(), edges, 17, scores)
    torch.testing.assert_close(output, attend_sample_by_sample(heads(), SampleLengths(LENGTHS), scores))


def test_no_varlen_kernel_is_used_without_a_gpu(monkeypatch):
    monkeypatch.setattr(sample_attention, "_available", sample_attention.AvailableKernels(True, torch, torch.add))
    assert sample_attention.varlen_kernel(heads(), AttentionSettings()) is None
    assert sample_attention.missing_kernel_warning(is_half=True) is None


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (sample_attention.AvailableKernels(False), "this GPU supports no varlen kernel"),
        (sample_attention.AvailableKernels(True, None, torch.add), None),
    ],
)
def test_a_gpu_without_a_varlen_kernel_is_warned_about(monkeypatch, found, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        sample_attention, "detect_kernels", lambda: monkeypatch.setattr(sample_attention, "_available", found)
    )
    warning = sample_attention.missing_kernel_warning(is_half=True)
    assert warning is None if said is None else said in warning
    assert sample_attention.missing_kernel_warning(is_half=False) is None
    of_sinks = sample_attention.missing_kernel_warning(is_half=True, has_sinks=True)
    assert of_sinks is not None
    assert said is not None or "no varlen kernel supports attention sinks" in of_sinks
    of_caps = sample_attention.missing_kernel_warning(is_half=True, of_flash_alone="soft caps")
    assert said is not None or "no soft caps. Install `flash-attn`" in of_caps


@pytest.mark.parametrize(
    ("settings", "needed"),
    [({}, ""), ({"attn_logit_softcapping": 50.0}, "soft caps"), ({"attention_dropout": 0.1}, "dropout")],
)
def test_soft_caps_and_dropout_of_attention_need_flash_attention(settings, needed):
    assert needs_flash_attention(PretrainedConfig(**settings)) == needed


def prove(model):
    def of_row(row):
        each = [Features({"input_ids": np.array(ids), "is_target": np.ones(len(ids), bool)}) for ids in row]
        return forward_logits(model, collate_padding_free(each))[0]

    check_isolation(of_row, config=model.config, vocabulary_size=97, is_half=False)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text"])
@pytest.mark.parametrize(
    "attention",
    ["eager", "sdpa", "per_sample", pytest.param("flex_attention", marks=pytest.mark.slow)],  # it is compiled first
)
def test_models_that_isolate_samples_are_accepted(kind, attention):
    prove(tiny_model(kind, attention))


def test_a_recurrent_model_without_sample_isolation_is_rejected_by_name():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3_next", num_experts=0)).eval()
    with refused(ModelError, "`qwen3_next`", "full_attention, linear_attention", "`by: tokens`"):
        prove(model)


def test_a_model_that_ignores_positions_is_refused():
    model = tiny_model("gpt2", "sdpa")
    given = model.forward

    def from_zero_to_end(position_ids, input_ids, **others):
        return given(input_ids=input_ids, position_ids=torch.arange(position_ids.shape[1])[None], **others)

    model.forward = from_zero_to_end
    with refused(ModelError, "`gpt2`"):
        prove(model)


def test_positions_that_are_not_reset_between_samples_are_detected():
    table = torch.randn(64, 97, generator=torch.Generator().manual_seed(0))

    def by_place_in_the_row(row):
        num_tokens = sum(len(ids) for ids in row)
        return table[:num_tokens]

    with refused(ModelError, "`gpt2`"):
        check_isolation(by_place_in_the_row, config=tiny_config("gpt2"), vocabulary_size=97, is_half=False)


def test_a_model_without_positions_is_refused_before_any_forward_pass():
    with refused(ModelError, "`gpt2`", "`position_ids`"):
        require_position_ids(frozenset({"input_ids", "attention_mask"}), config=tiny_config("gpt2"))
