"""The memory of the loss in chunks is what is documented, and its numbers are those of all logits in float64."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from finetune.task import distillation
from finetune.task.lm_loss import chunked_loss
from finetune.task.lm_loss.chunked_loss import CHUNK_BYTES, LossSpec, bytes_per_logit, rows_per_chunk
from finetune.task.lm_loss.head import LmHead
from finetune.task.lm_loss.logit_transform import LogitTransform
from finetune.task.lm_loss.target_loss import _training_loss
from finetune.task.lm_loss.token_loss import TokenLoss
from tests import launching
from tests.devices import EVERY_DEVICE
from tests.live_bytes import peak_memory

CAPPED = LogitTransform(scale=0.5, soft_cap=3.0)
CHUNK_MEGABYTES = {"cpu": 67.2, "cuda": 512.0}
"""What docs/concepts/speed.md says; 64 MiB are 67.1 MB."""

MEASURED = pytest.mark.parametrize(
    ("vocabulary", "hidden"), [(50_021, 32), (100_003, 16), pytest.param(8_192, 64, id="as many rows as there may be")]
)


@EVERY_DEVICE
@MEASURED
@pytest.mark.parametrize("transform", [LogitTransform(), CAPPED], ids=["as they are", "capped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_summed", [True, False], ids=["summed", "of each row"])
def test_a_chunk_takes_at_most_what_is_documented(device, vocabulary, hidden, transform, dtype, is_summed, figure):
    if device == "cuda":
        vocabulary *= 2
    logit_bytes = bytes_per_logit(dtype, transform, torch.device(device))
    size = rows_per_chunk(vocabulary, torch.device(device), logit_bytes=logit_bytes)
    spec = LossSpec(TokenLoss(0.1, 0.01), transform, dtype, size)
    rows, weight, labels = _inputs(5 * size, vocabulary, hidden=hidden, dtype=dtype, device=device)
    _small_products(device)
    with peak_memory(device) as memory:
        if is_summed:
            chunked_loss.loss_sums(rows, weight, None, labels, spec)[0].backward()
        else:
            chunked_loss.row_losses(rows, weight, None, labels, spec)[0].sum().backward()
    of_chunk = memory.peak - rows.grad.nbytes
    figure(f"one chunk, {vocabulary} tokens, {dtype}, MB", of_chunk / 1e6, at_most=CHUNK_MEGABYTES[device] * 1.01)
    assert of_chunk <= 1.01 * logit_bytes * size * vocabulary


@EVERY_DEVICE
@pytest.mark.parametrize("transform", [LogitTransform(), CAPPED], ids=["as they are", "capped"])
@pytest.mark.parametrize("is_half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("loss", ["cross-entropy", "smoothed", "forward_kl", "reverse_kl", "top_k", "jsd"])
def test_a_chunk_with_an_autograd_backward_takes_at_most_the_documented_memory(
    device, loss, is_half, transform, figure
):
    vocabulary, num_rows = (30_011, 2_000) if device == "cuda" else (16_411, 300)
    head = LmHead(_HeadWithAdapter(16, vocabulary).to(device), transform, is_rowwise=True)
    rows, _, labels = _inputs(num_rows, vocabulary, hidden=16, dtype=torch.float32, device=device)
    inputs = _teacher_targets(loss, labels, vocabulary)
    _small_products(device)
    with torch.autocast(device, torch.bfloat16, enabled=is_half), peak_memory(device) as memory:
        _sums_of(loss, inputs)(rows, head, labels=labels)[0].backward()
    of_chunk = memory.peak - rows.grad.nbytes
    figure(f"one chunk of {loss} with adapters, MB", of_chunk / 1e6, at_most=CHUNK_MEGABYTES[device] * 1.05)


@EVERY_DEVICE
def test_the_loss_of_a_large_vocabulary_is_exact_and_small(device, figure):
    """Float32 weights under autocast: over inputs and gradients there are a copy of the weights, and one chunk."""
    num_rows, vocabulary, hidden = (8_192, 128_256, 4_096) if device == "cuda" else (600, 20_011, 32)
    rows, weight, labels = _inputs(
        num_rows, vocabulary, hidden=hidden, dtype=torch.bfloat16, device=device, weight_dtype=torch.float32
    )
    weight.requires_grad_()
    head = LmHead(_linear(weight), LogitTransform(), is_rowwise=True)
    _small_products(device)
    with torch.autocast(device, torch.bfloat16), peak_memory(device) as memory:
        loss = _training_loss(rows, head, labels=labels, loss=TokenLoss(), kernel="chunked")[0]
        loss.backward()
    over_gradient = memory.peak - weight.nbytes
    limit = 1.7 if device == "cuda" else 2 * weight.nbytes / 4e9 + rows.grad.nbytes / 1e9 + 0.068
    figure("linear loss over its inputs and its weights' gradient, GB", over_gradient / 1e9, at_most=limit)
    wanted, of_rows, of_weight = _exact(rows.detach(), weight.detach(), labels)
    figure("error of the linear loss", abs(loss.item() / wanted - 1), at_most=5e-3)
    figure("error of the rows' gradient", _error(rows.grad, of_rows), at_most=5e-3)
    figure("error of the weights' gradient", _error(head.module.weight.grad, of_weight), at_most=5e-3)


def test_the_documented_bytes_per_logit_are_those_counted():
    assert {name: size / 1e6 for name, size in CHUNK_BYTES.items()} == pytest.approx(CHUNK_MEGABYTES, rel=2e-3)
    on_gpu, plain = torch.device("cuda"), LogitTransform()
    bytes_each = [bytes_per_logit(torch.bfloat16, each, on_gpu) for each in (plain, CAPPED)]
    assert bytes_each == [6, 10]
    assert rows_per_chunk(128_256, on_gpu, logit_bytes=6) == 640  # 665, in whole tiles


class _HeadWithAdapter(nn.Module):
    """A frozen head with LoRA, in shape."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base = nn.Linear(hidden, vocabulary, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(hidden, 2, bias=False), nn.Linear(2, vocabulary, bias=False)
        self.out_features = vocabulary

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base(hidden) + self.up(self.down(hidden)) * 2.0


def _inputs(num_rows, vocabulary, *, hidden, dtype, device, weight_dtype=None):
    torch.manual_seed(0)
    rows = torch.randn(num_rows, hidden, device=device, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, hidden, device=device, dtype=weight_dtype or dtype) / hidden**0.5
    return rows, weight, torch.randint(0, vocabulary, (num_rows,), device=device)


def _linear(weight):
    module = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
    module.weight = nn.Parameter(weight.detach())
    return module


def _small_products(device):
    """Multiply in both passes: a library of a GPU keeps what it allocates at its first call."""
    for dtype in (torch.float32, torch.bfloat16):
        one = torch.ones(64, 64, device=device, dtype=dtype, requires_grad=True)
        torch.addmm(one, one, one @ one).sum().backward()


def _teacher_targets(loss, labels, vocabulary):
    if loss in ("cross-entropy", "smoothed"):
        return None
    teacher = torch.zeros(len(labels), vocabulary, device=labels.device).log_softmax(1)
    if loss != "top_k":
        return teacher, None
    ids = torch.arange(8, device=labels.device).expand(len(labels), 8).contiguous()
    return distillation.reduce_to_top_k(teacher, ids), ids


def _sums_of(loss, teacher_targets):
    if teacher_targets is None:
        plain = loss == "cross-entropy"
        return partial(_training_loss, loss=TokenLoss() if plain else TokenLoss(0.1, 0.01), kernel="chunked")
    task = object.__new__(distillation.DistillationTask)
    task._num_tokens = teacher_targets[0].shape[1] if loss != "top_k" else 1 << 30
    divergence = "forward_kl" if loss == "top_k" else loss
    task.section = SimpleNamespace(cross_entropy_weight=0.3, temperature=2.0, divergence=divergence, jsd_beta=0.3)
    return partial(task._sums_of_targets, teacher_targets=teacher_targets)


def _exact(rows, weight, labels):
    """Return loss and gradients in float64 of the very numbers that the products are given, some rows at a time."""
    half = weight.bfloat16().double()
    loss, of_rows, of_weight = 0.0, torch.empty(rows.shape, device=rows.device), torch.zeros_like(half)
    for part in torch.arange(len(rows), device=rows.device).split(512):
        each = rows[part].double()
        logits = each @ half.t()
        loss += float(functional.cross_entropy(logits, labels[part], reduction="sum"))
        gradient = logits.softmax(dim=1)
        gradient[torch.arange(len(part), device=rows.device), labels[part]] -= 1
        of_rows[part] = (gradient @ half).float()
        of_weight += gradient.t() @ each
    return loss, of_rows, of_weight


def _error(found, wanted):
    wanted = wanted.double()
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.distributed
def test_ranks_that_share_a_vocabulary_have_the_loss_and_the_gradients_of_the_whole():
    ended = launching.capture(launching.torchrun_command("-m", "tests.task.lm_loss.split_vocabulary"))
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["rank 0: equal", "rank 1: equal"]
