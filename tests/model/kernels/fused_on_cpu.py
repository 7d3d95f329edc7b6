"""Runs liger's kernels in Triton's interpreter and prints the results as JSON; started by test_fused_layers.py."""

import copy
import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.model.kernels import triton_on_cpu  # noqa: F401  # before triton is imported

# isort: split
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.memory.tracer import LiveBytes
from finetune.model.kernels import fused_layers
from finetune.task.lm_loss import chunked_loss, target_loss
from finetune.task.lm_loss.head import LmHead
from finetune.task.lm_loss.logit_transform import LogitTransform
from finetune.task.lm_loss.token_loss import TokenLoss

SIZE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def steps_of(model_type: str) -> dict[str, Any]:
    """Return the loss and the largest relative difference of gradients with kernels and without."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **SIZE), attn_implementation="eager"
    ).eval()
    fused, ids = copy.deepcopy(plain), torch.randint(3, 60, (2, 9))
    names = list(plain.state_dict())
    own = plain(input_ids=ids, labels=ids).loss
    own.backward()
    with fused_layers.restored_rotary_functions():
        counts = fused_layers.fuse_layers(fused)
        copied = copy.deepcopy(fused)
        with LiveBytes() as live:
            loss = fused(input_ids=ids, labels=ids).loss
        with LiveBytes() as keeping, patch.object(fused_layers, "_recomputed", lambda *_: nullcontext()):
            loss_of_kept = fused(input_ids=ids, labels=ids).loss
        assert torch.equal(loss, loss_of_kept)
        recomputed_bytes = keeping.now - live.now
        loss.backward()
        with torch.no_grad():
            next(iter(copied.parameters())).zero_()
            is_own_copy = bool(copied(input_ids=ids, labels=ids).loss != loss)
    pairs = zip(plain.parameters(), fused.parameters(), strict=True)
    gradients = [(one.grad, other.grad) for one, other in pairs if one.grad is not None]
    return {
        "counts": dict(counts),
        "loss": abs(own.item() - loss.item()),
        "gradients": max(
            float((one - other).abs().max() / one.abs().max().clamp(min=1e-9)) for one, other in gradients
        ),
        "is_own_copy": is_own_copy,
        "recomputed_bytes": recomputed_bytes,
        "keeps_names": names == list(fused.state_dict()),
    }


def loss_of_chunks() -> dict[str, float]:
    """Return the relative differences between the chunked loss with liger's kernel and without, and in float64."""
    torch.manual_seed(3)
    head = LmHead(nn.Linear(16, 101, bias=True), LogitTransform(), is_rowwise=True)
    labels, values = torch.randint(0, 101, (150,)), torch.randn(150, 16)
    results = []
    for is_fused, kind in ((True, torch.float32), (False, torch.float32), (False, torch.float64)):
        chunked_loss.fuse_chunks("cpu" if is_fused else None)
        rows, module = values.to(kind, copy=True).requires_grad_(), head.module.to(kind)
        module.zero_grad()
        if kind == torch.float64:
            loss = functional.cross_entropy(module(rows), labels, reduction="sum")
        else:
            spec = target_loss._loss_spec(rows, head, module.weight, TokenLoss(), is_summed=True)
            assert spec.is_fused == is_fused
            chunked = replace(spec, rows=64)
            loss = chunked_loss.loss_sums(rows, module.weight, module.bias, labels, chunked)[0]
        (2 * loss).backward()
        results.append([each.double() for each in (loss.detach(), rows.grad, module.weight.grad, module.bias.grad)])
    chunked_loss.fuse_chunks(None)
    return {
        f"{name} against {other}": float((one - wanted).abs().max() / wanted.abs().max())
        for other, found in (("ours", results[1]), ("float64", results[2]))
        for name, one, wanted in zip(("loss", "rows", "weight", "bias"), results[0], found, strict=True)
    }


class Odd(nn.Module):
    """Looks like a gated MLP, but computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down_proj(functional.dropout(functional.silu(self.gate_proj(rows)), 0.1) * self.up_proj(rows))


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "models": {name: steps_of(name) for name in sys.argv[1:]},
                "chunks": loss_of_chunks(),
                "odd": dict(fused_layers.fuse_layers(Odd())),
            }
        )
    )
