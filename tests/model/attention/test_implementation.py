"""Every kind of model that is said to keep samples apart does, and others are not said to."""

import json
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.errors import ModelError
from finetune.model.attention import varlen_kernels
from finetune.model.attention.causal import AttentionSettings, QueryKeyValue, causal_attention
from finetune.model.attention.implementation import (
    PACKING_MODEL_TYPES,
    attend_sample_by_sample,
    default_attention,
    requested_attention,
    supports_packed_samples,
)
from finetune.runtime.packed_rows import SampleLengths
from tests.model.attention.small_models import LENGTHS, row_of, tiny_config, tiny_model, tokens


@torch.no_grad()
@pytest.mark.parametrize("kind", sorted(PACKING_MODEL_TYPES))
def test_a_sample_in_a_row_is_the_sample_alone_under_eager_attention(kind):
    alone, together = tiny_model(kind, "eager"), tiny_model(kind)
    samples = [tokens(length, salt) for salt, length in enumerate(LENGTHS)]
    expected = torch.cat([alone(input_ids=each, use_cache=False).logits for each in samples], dim=1)
    logits = together(**row_of(samples)).logits
    assert ((logits - expected).abs().max() / expected.abs().max()).item() < 1e-5
    assert supports_packed_samples(together.config)


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
    assert default_attention(tiny_config(kind, **values)) is None


def test_code_that_comes_with_a_model_is_not_trusted_to_keep_them_apart():
    own = type(tiny_config("llama"))
    brought = type("BroughtConfig", (own,), {"__module__": "transformers_modules.someone.configuration_llama"})
    assert not supports_packed_samples(brought())


def test_auto_gives_known_models_our_attention_and_what_is_written_stays():
    assert default_attention(tiny_config("llama")) == "per_sample"
    assert requested_attention("auto") is None
    assert requested_attention("sdpa") == "sdpa"


def samples(lengths=LENGTHS):
    return [tokens(length, salt) for salt, length in enumerate(lengths)]


def block_masked(given):
    """Return the same row as transformers' own attention is given it: positions alone tell where samples begin."""
    return {name: given[name] for name in ("input_ids", "position_ids", "use_cache")}


def learnt(model, given):
    """Return the logits, and the gradient of all that learns."""
    model.zero_grad()
    logits = model(**given).logits
    logits.log_softmax(dim=-1)[..., 5].sum().backward()
    learning = [each for each in model.parameters() if each.requires_grad]
    assert learning
    return logits.detach(), torch.cat([each.grad.flatten() for each in learning])


def assert_equal(one, other):
    for mine, theirs in zip(one, other, strict=True):
        assert ((mine - theirs).norm() / theirs.norm()).item() < 1e-5


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3_text", "gpt2"])
def test_logits_and_gradients_are_those_of_sdpa_with_a_block_mask(kind):
    given = row_of(samples())
    assert_equal(learnt(tiny_model(kind), given), learnt(tiny_model(kind, "sdpa"), block_masked(given)))


def test_capped_scores_are_those_of_eager_attention_with_a_block_mask():
    given, caps = row_of(samples()), {"attn_logit_softcapping": 2.0}
    ours, eager = tiny_model("gemma2", **caps), tiny_model("gemma2", "eager", **caps)
    assert_equal(learnt(ours, given), learnt(eager, block_masked(given)))


def test_samples_of_one_length_are_one_call_with_the_same_numbers():
    given = row_of(samples((9, 9, 9, 9)))
    assert_equal(learnt(tiny_model("mistral"), given), learnt(tiny_model("mistral", "sdpa"), block_masked(given)))


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_recomputed_layers_are_told_the_lengths_again(is_reentrant):
    plain, recomputing = tiny_model("llama"), tiny_model("llama")
    settings = {"use_reentrant": is_reentrant}
    recomputing.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    given = row_of(samples())
    assert_equal(learnt(recomputing, given), learnt(plain, given))


def test_adapters_learn_the_same():
    def adapted(attention):
        model = tiny_model("llama", attention)
        torch.manual_seed(1)
        return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))

    given = row_of(samples())
    assert_equal(learnt(adapted("per_sample"), given), learnt(adapted("sdpa"), block_masked(given)))


class Largest(TorchDispatchMode):
    """Remembers the most numbers that any operation returned in one tensor."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, torch.Tensor):
                self.numel = max(self.numel, each.numel())
        return result


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_nothing_as_large_as_the_square_of_the_row_is_made(kind):
    given = row_of(samples((16, 8) * 20))
    square = given["input_ids"].numel() ** 2
    seen = {}
    for attention, inputs in (("per_sample", given), ("sdpa", block_masked(given))):
        with Largest() as largest:
            tiny_model(kind, attention)(**inputs)
        seen[attention] = largest.numel
    assert seen["per_sample"] < square / 4
    assert seen["sdpa"] >= square


@torch.no_grad()
def test_padded_batches_are_what_sdpa_makes_of_them():
    ids = torch.cat([tokens(9, 0), tokens(9, 1)])
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    ours, theirs = (tiny_model("qwen3", name)(input_ids=ids, attention_mask=mask) for name in ("per_sample", "sdpa"))
    assert torch.equal(ours.logits, theirs.logits)


@pytest.mark.parametrize(("kind", "other"), [("llama", "sdpa"), ("gemma2", "eager"), ("mistral", "sdpa")])
def test_answers_are_those_of_transformers_own_attention(kind, other):
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


def test_a_model_that_loses_the_lengths_is_an_error_and_no_wrong_number():
    with pytest.raises(ModelError, match="StableLmAttention does not pass sample lengths to its attention"):
        tiny_model("stablelm")(**row_of(samples()))


def heads(num_heads=4, num_key_heads=2):
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, num, sum(LENGTHS), 8) for num in (num_heads, num_key_heads, num_key_heads)]
    return QueryKeyValue(*(torch.randn(shape, generator=draw) for shape in shapes))


def row_by_row(query, key, value, edges, *, scale, window, softcap=None):
    """Return what a kernel for rows promises, [tokens, heads, width], a window being keys before a query's own."""
    window = None if window < 0 else window + 1
    parts = []
    for start, stop in pairwise(edges):
        of_one = QueryKeyValue(*(each[start:stop].transpose(0, 1)[None] for each in (query, key, value)))
        parts.append(causal_attention(of_one, AttentionSettings(scale, 0.0, softcap, window))[0])
    return torch.cat(parts)


@pytest.mark.parametrize("groups_heads", [True, False])
@pytest.mark.parametrize("window", [None, 6])
def test_the_kernel_of_torch_is_told_what_the_layer_wants(monkeypatch, groups_heads, window):
    def torchs(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, **groups):
        assert groups == ({"enable_gqa": True} if groups_heads else {})
        assert (key.shape[1] == query.shape[1]) != groups_heads
        assert (max_q, max_k, window_size[1]) == (17, 17, 0)
        return row_by_row(query, key, value, cu_q.tolist(), scale=scale, window=window_size[0])

    monkeypatch.setattr(varlen_kernels, "_available", varlen_kernels.AvailableKernels(True, None, torchs, groups_heads))
    scores, edges = AttentionSettings(0.5, window=window), torch.tensor([0, *LENGTHS]).cumsum(0).int()
    output = varlen_kernels._torch_varlen(heads(), edges, 17, scores)
    torch.testing.assert_close(output, attend_sample_by_sample(heads(), SampleLengths(LENGTHS), scores))


def test_flash_attention_is_told_what_the_layer_wants(monkeypatch):
    def flash(query, key, value, cu_q, cu_k, max_q, max_k, *, dropout_p, softmax_scale, causal, window_size, softcap):
        assert (dropout_p, causal, window_size[1]) == (0.0, True, 0)
        return row_by_row(
            query, key, value, cu_q.tolist(), scale=softmax_scale, window=window_size[0], softcap=softcap or None
        )

    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func = flash
    monkeypatch.setattr(varlen_kernels, "_available", varlen_kernels.AvailableKernels(True, package))
    scores, edges = AttentionSettings(0.5, softcap=2.0, window=6), torch.tensor([0, *LENGTHS]).cumsum(0).int()
    output = varlen_kernels._flash_varlen(heads(), edges, 17, scores)
    torch.testing.assert_close(output, attend_sample_by_sample(heads(), SampleLengths(LENGTHS), scores))


def test_no_kernel_for_rows_is_taken_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(varlen_kernels, "_available", varlen_kernels.AvailableKernels(True, torch, torch.add))
    assert varlen_kernels.varlen_kernel(heads(), AttentionSettings()) is None
    assert varlen_kernels.missing_kernel_warning(is_half=True) is None


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (varlen_kernels.AvailableKernels(False), "this GPU runs no kernel"),
        (varlen_kernels.AvailableKernels(True), "flash attention is not installed"),
        (varlen_kernels.AvailableKernels(True, None, torch.add), None),
    ],
)
def test_a_gpu_without_a_kernel_for_rows_is_told_of(monkeypatch, found, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        varlen_kernels, "detect_kernels", lambda: monkeypatch.setattr(varlen_kernels, "_available", found)
    )
    warning = varlen_kernels.missing_kernel_warning(is_half=True)
    assert warning is None if said is None else said in warning
    assert varlen_kernels.missing_kernel_warning(is_half=False) is None
