"""Each workaround for transformers in packed rows is still needed and changes nothing else."""

import functools
import inspect
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import conv1d

from finetune.model.attention import upstream
from finetune.model.attention.supported_models import HYBRID_MODEL_TYPES
from finetune.model.attention.upstream import (
    ROW_FUNCTIONS,
    ScanInputs,
    convolve_samples,
    modeling_file,
    patch_row_functions,
    scan_samples,
)
from finetune.runtime.parallel import SAMPLE_LENGTHS, SampleLengths
from tests.model.attention.small_models import LENGTHS, row_of, tiny_config, tiny_model, tokens

EDGES = torch.tensor([0, 2, 5], dtype=torch.int32)


def function_of(kind, name):
    """Return a function of a model's file as transformers defines it."""
    config = tiny_config(kind)
    patch_row_functions(config)
    return vars(modeling_file(config))[name].__wrapped__


@pytest.mark.parametrize("name", ROW_FUNCTIONS)
def test_functions_of_transformers_cannot_isolate_samples(name):
    kind = next(kind for kind, names in HYBRID_MODEL_TYPES.items() if name in names and kind != "lfm3")
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        function_of(kind, name)(seq_idx=torch.zeros(1, 5))


@pytest.mark.parametrize("kind", HYBRID_MODEL_TYPES)
def test_every_function_of_a_file_that_mixes_positions_is_known(kind):
    file = modeling_file(tiny_config(kind))
    functions = {name: each for name, each in vars(file).items() if inspect.isfunction(each)}
    found = {name for name, each in functions.items() if hasattr(each, "__wrapped__") or name in ROW_FUNCTIONS}
    mixing = {name for name in found if not name.endswith("_update") and "recurrent" not in name}
    assert mixing - OF_TRANSFORMERS == set(HYBRID_MODEL_TYPES[kind])


OF_TRANSFORMERS = {
    "can_return_tuple",
    "force_accelerate_hooks",
    "auto_docstring",
    "merge_with_config_defaults",
    "create_causal_mask",
    "create_sliding_window_causal_mask",
}


@pytest.mark.parametrize(
    ("name", "boundaries", "given"),
    [
        ("causal_conv1d_fn", {"seq_idx": [[0, 0, 1, 1, 1]]}, {"cu_seq_lens_q": EDGES}),
        ("mamba2_chunk_scan", {"seq_idx": [[0, 0, 1, 1, 1]]}, {"cu_seq_lens_q": EDGES}),
        ("torch_chunk_gated_delta_rule", {"cu_seqlens": [0, 2, 5]}, {"cu_seqlens": EDGES}),
    ],
)
def test_a_kernel_that_separates_samples_gets_their_boundaries(monkeypatch, name, boundaries, given):
    monkeypatch.setattr(upstream, "_takes", lambda *_: True)
    calls = []
    told = upstream._separating(calling_a_kernel(lambda *args, **named: calls.append(named)), ROW_FUNCTIONS[name])
    told(SimpleNamespace(is_cuda=True), activation="silu", **given, **{SAMPLE_LENGTHS: SampleLengths((2, 3))})
    (named,) = calls
    assert named.pop("activation") == "silu"
    assert {key: named[key].tolist() for key in boundaries} == boundaries
    assert SAMPLE_LENGTHS not in named


def calling_a_kernel(kernel):
    """Return the function as transformers decorates it where the kernel is installed."""
    return functools.wraps(lambda: None)(lambda *args, **named: kernel(*args, **named))


class OnGpu(torch.Tensor):
    is_cuda = True


def test_a_function_that_never_calls_a_kernel_gets_no_boundaries(monkeypatch):
    monkeypatch.setattr(upstream, "_takes", lambda *_: True)
    plain = inspect.unwrap(function_of("lfm3", "causal_conv1d_fn"))  # decorated from transformers 5.24 on
    assert not hasattr(plain, "__wrapped__")
    row, weight, lengths = torch.randn(1, 3, 5), torch.randn(3, 4), SampleLengths((2, 3))
    on_gpu = row.as_subclass(OnGpu)
    output = upstream._separating(plain, ROW_FUNCTIONS["causal_conv1d_fn"])(on_gpu, weight, sample_lengths=lengths)
    expected = torch.cat([plain(each, weight) for each in row.split(lengths.values, 2)], 2)
    torch.testing.assert_close(output.as_subclass(torch.Tensor), expected)


def test_a_fused_kernel_that_cannot_separate_samples_is_left_out(monkeypatch):
    monkeypatch.setattr(upstream, "_takes", lambda *_: False)
    told = upstream._separating(calling_a_kernel(pytest.fail), ROW_FUNCTIONS["mamba2_split_conv1d_scan_combined"])
    assert told(SimpleNamespace(is_cuda=True), **{SAMPLE_LENGTHS: SampleLengths((2, 3))}) is None


def test_mamba_2_still_drops_keyword_arguments_of_its_head():
    model, seen = tiny_model("mamba2"), []
    model.backbone.register_forward_pre_hook(lambda _, __, named: seen.append(set(named)), with_kwargs=True)
    given = row_of([tokens(3, 0), tokens(4, 1)])
    given.pop("position_ids")
    model(**given)
    assert SAMPLE_LENGTHS not in seen[0], "transformers passes it on: remove mamba2 from DROPPED_ARGUMENTS"


@torch.no_grad()
def test_llama_4_still_tunes_temperatures_by_the_place_in_the_row():
    model = tiny_model("llama4_text", "sdpa", layer_types=["full_attention"] * 2)
    row = row_of([tokens(length, salt) for salt, length in enumerate(LENGTHS)])
    given = {name: row[name] for name in ("input_ids", "position_ids", "use_cache")}
    alone = model(input_ids=tokens(LENGTHS[2], 2), use_cache=False).logits[0]
    in_row = model(**given).logits[0].split(LENGTHS)[2]
    assert (alone - in_row).abs().max() > 1e-3, "transformers reads the positions: remove retune_queries"


ROW_LENGTHS = (70, 1, 33, 2, 64, 5, 70)


def convolve(row, weight, bias=None):
    return conv1d(row, weight[:, None], bias, padding=weight.shape[-1] - 1, groups=row.shape[1])[:, :, : row.shape[2]]


@pytest.mark.parametrize("reach", [1, 2, 4])
def test_a_convolution_reads_zeros_before_each_sample_in_one_call(reach):
    calls = []

    def counted(*given):
        calls.append(given)
        return convolve(*given)

    row, weight, bias = torch.randn(1, 3, sum(ROW_LENGTHS)), torch.randn(3, reach), torch.randn(3)
    expected = torch.cat([convolve(each, weight, bias) for each in row.split(ROW_LENGTHS, 2)], dim=2)
    torch.testing.assert_close(convolve_samples(counted, SampleLengths(ROW_LENGTHS), row, weight, bias), expected)
    assert len(calls) == 1


def decaying_sum(values, decay, scale, *, chunk_size=64, seen):
    """Return a scan over [batch, time, width]: the decayed previous sum plus the value."""
    seen.append((tuple(values.shape[:2]), chunk_size))
    state, outputs = torch.zeros_like(values[:, 0]), []
    for value, factor in zip(values.unbind(1), decay.unbind(1), strict=True):
        state = state * factor + value * scale
        outputs.append(state)
    return torch.stack(outputs, 1), None


def test_a_scan_runs_over_groups_of_similar_length_in_blocks_no_longer_than_they_are():
    inputs = ScanInputs(frozenset({0, "decay"}), dimension=1, chunk_size="chunk_size")
    values, decay = (torch.randn(1, sum(ROW_LENGTHS), 2, requires_grad=True) for _ in range(2))
    seen, alone = [], []
    row, state = scan_samples(
        inputs, decaying_sum, SampleLengths(ROW_LENGTHS), values, decay=decay.sigmoid(), scale=0.5, seen=seen
    )
    assert state is None
    assert seen == [((3, 70), 64), ((1, 33), 33), ((3, 5), 5)]
    parts = zip(values.split(ROW_LENGTHS, 1), decay.sigmoid().split(ROW_LENGTHS, 1), strict=True)
    expected = torch.cat([decaying_sum(*part, 0.5, seen=alone)[0] for part in parts], dim=1)
    torch.testing.assert_close(row, expected)
    ours, theirs = (torch.autograd.grad(each.square().sum(), (values, decay)) for each in (row, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
