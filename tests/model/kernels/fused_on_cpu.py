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
from liger_kernel import ops
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


def kernel_errors() -> dict[str, float]:
    """Return the largest error of outputs and gradients against float64, over odd shapes and dtypes."""
    errors: dict[str, float] = {}
    for dtype in (torch.float32, torch.float16):  # the interpreter multiplies the bits of two bfloat16
        for rows, width in ((1, 1), (3, 7), (5, 48), (17, 130), (2, 1025)):
            torch.manual_seed(rows)
            x, y, w = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
            for casting, offset in (("llama", 0.0), ("gemma", 1.0)):
                arguments = (1e-6, offset, casting, False)
                error = _error(
                    lambda x, w, given=arguments: ops.LigerRMSNormFunction.apply(x, w, *given),
                    lambda x, w, offset=offset: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (w + offset),
                    (x, w),
                    dtype,
                )
                errors[f"{casting} norm {rows}x{width} {dtype}"] = error
            gelu = lambda a, b: functional.gelu(a, approximate="tanh") * b  # noqa: E731
            errors[f"swiglu {rows}x{width} {dtype}"] = _error(
                ops.LigerSiLUMulFunction.apply, lambda a, b: functional.silu(a) * b, (x, y), dtype
            )
            errors[f"swiglu of halves {rows}x{width} {dtype}"] = _error(
                lambda both: ops.LigerFusedGateUpSiLUMulFunction.apply(both.clone(), True),
                lambda both: functional.silu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1],
                (torch.cat((x, y), -1),),
                dtype,
            )
            errors[f"geglu {rows}x{width} {dtype}"] = _error(ops.LigerGELUMulFunction.apply, gelu, (x, y), dtype)
        for heads, others, length, width in ((1, 1, 1, 2), (6, 2, 5, 6), (3, 3, 7, 64)):
            q, k = torch.randn(2, heads, length, width), torch.randn(2, others, length, width)
            angles = torch.randn(2, length, width // 2).repeat(1, 1, 2)
            cos, sin = angles.cos(), angles.sin()

            def rotated(q: Tensor, k: Tensor, cos: Tensor = cos, sin: Tensor = sin) -> Tensor:
                halves = [states.chunk(2, -1) for states in (q, k)]
                swapped = [torch.cat((-second, first), -1) for first, second in halves]
                turned = (
                    states * cos[:, None] + other * sin[:, None] for states, other in zip((q, k), swapped, strict=True)
                )
                return torch.cat([states.flatten() for states in turned])

            def kernel(q: Tensor, k: Tensor, cos: Tensor = cos, sin: Tensor = sin) -> Tensor:
                turned = ops.LigerRopeFunction.apply(q.clone(), k.clone(), cos.to(q.dtype), sin.to(q.dtype))
                return torch.cat([one.flatten() for one in turned])

            errors[f"rotary {heads}/{others}x{length}x{width} {dtype}"] = _error(kernel, rotated, (q, k), dtype)
    return errors


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


def _error(kernel: Any, reference: Any, values: tuple[Tensor, ...], dtype: torch.dtype) -> float:
    """Return the largest error in units of the dtype's precision and the largest value."""
    results = []
    for function, kind in ((kernel, dtype), (reference, torch.float64)):
        inputs = [value.detach().to(dtype).to(kind, copy=True).requires_grad_() for value in values]
        output = function(*inputs)
        output.backward(torch.linspace(-1, 1, output.numel()).reshape(output.shape).to(dtype).to(kind))
        results.append([output.detach().double(), *(value.grad.double() for value in inputs)])
    scale = torch.finfo(dtype).eps
    return max(
        float((one - other).abs().max() / (scale * other.abs().max().clamp(min=1.0)))
        for one, other in zip(*results, strict=True)
    )


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
                "kernels": kernel_errors(),
                "chunks": loss_of_chunks(),
                "odd": dict(fused_layers.fuse_layers(Odd())),
            }
        )
    )
