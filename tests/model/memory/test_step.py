"""What a step takes is worked out from shapes: examples that can be checked by hand."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, ResNetConfig

from finetune.model.memory.step import (
    CONTEXT_BYTES,
    NCCL_BYTES,
    ForwardPass,
    Shapes,
    activation_bytes,
    autocast_bytes,
    gathered_bytes,
    library_bytes,
    loss_bytes,
    read_shapes,
)
from finetune.task.model_inputs import unwrap_model
from tests.live_bytes import LiveBytes

LLAMA_8B = Shapes(hidden=4096, queries=4096, keys=1024, heads=32, intermediate=14336, layers=32, vocabulary=128256)
BF16 = ForwardPass(num_tokens=4096, longest=4096, item_bytes=2, stream_bytes=2)


def test_shapes_come_from_the_config_of_a_text_model_and_of_no_other():
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3, vocab_size=99
    )
    found = read_shapes(config)
    assert (found.queries, found.keys, found.layers, found.vocabulary) == (64, 32, 3, 99)
    assert read_shapes(ResNetConfig()) is None


def test_llama_8b_at_4096_tokens_saves_about_34_times_the_stream_and_recomputed_one_layer():
    """Korthikanti et al. give 34 bytes per token, layer and hidden number for GPT's; here 3.5 times wider MLPs."""
    whole = activation_bytes(LLAMA_8B, BF16)
    per_number = whole / (4096 * 32 * 4096)
    assert 40 < per_number < 60  # 12 of norms, 4 of inputs, 5 of attention, 28 of the MLP
    recomputed = activation_bytes(LLAMA_8B, ForwardPass(4096, 4096, 2, 2, checkpointing=True))
    assert recomputed < 0.12 * whole
    selective = activation_bytes(LLAMA_8B, ForwardPass(4096, 4096, 2, 2, checkpointing="selective"))
    assert recomputed < selective < 0.7 * whole
    every_second = activation_bytes(LLAMA_8B, ForwardPass(4096, 4096, 2, 2, checkpointing=2))
    assert every_second == pytest.approx(whole / 2, rel=0.15)


def test_autocast_copies_the_matrices_that_are_trained_or_saved():
    """18 bytes per parameter with AdamW instead of 16."""
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4), nn.LayerNorm(4))
    assert autocast_bytes(model, checkpoints=False) == autocast_bytes(model, checkpoints=True) == 2 * 8 * 4
    model[1].weight.requires_grad_(False)
    assert autocast_bytes(model, checkpoints=False) == 2 * 8 * 4
    assert autocast_bytes(model, checkpoints=True) == 0
    assert autocast_bytes(model.to(torch.bfloat16), checkpoints=False) == 0


def test_logits_are_those_of_a_chunk():
    sizes = {"chunk_rows": 1024, "logit_bytes": 6, "full_logits": 1 << 18}
    lora = loss_bytes(LLAMA_8B, BF16, **sizes, trains_head=False)
    assert lora == 6 * 1024 * 128256 + 8 * 4096 * 4096
    assert loss_bytes(LLAMA_8B, BF16, **sizes, trains_head=True) - lora == 4 * 128256 * 4096
    assert loss_bytes(LLAMA_8B, ForwardPass(2, 2, 2, 2), **sizes, trains_head=False) == 12 * 2 * 128256


def test_two_layers_are_whole_where_parameters_are_sharded():
    model = nn.Sequential(nn.Embedding(10, 10), *(nn.Linear(10, 10, bias=False) for _ in range(4)))
    whole = 2 * 100 + 100
    assert gathered_bytes(model, num_layers=4, item_bytes=2, gradient_bytes=4) == 2 * whole * (2 + 4)
    model.requires_grad_(False)
    assert gathered_bytes(model, num_layers=4, item_bytes=2, gradient_bytes=4) == 2 * whole * 2


def test_libraries_take_memory_of_a_gpu_alone():
    assert library_bytes(has_device=False, num_processes=8) == 0
    assert library_bytes(has_device=True, num_processes=1) == CONTEXT_BYTES
    assert library_bytes(has_device=True, num_processes=8) == CONTEXT_BYTES + NCCL_BYTES


@pytest.mark.parametrize("mode", [False, True])
def test_the_live_bytes_of_a_step_are_within_a_quarter_of_the_estimate(mode):
    values = {"hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": 6, "vocab_size": 32}
    config = LlamaConfig(**values, num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").train()
    if mode:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(0, 32, (1, 512))
    unwrap_model(model)(input_ids=ids, use_cache=False).logits.sum().backward()  # the gradients exist from here on
    with LiveBytes() as memory:
        unwrap_model(model)(input_ids=ids, use_cache=False).logits.sum().backward()
    estimate = activation_bytes(read_shapes(config), ForwardPass(512, 512, 4, 4, checkpointing=mode))
    assert memory.peak == pytest.approx(estimate, rel=0.25)
