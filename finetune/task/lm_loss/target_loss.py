"""The loss of predicted tokens, computed only at target positions, by our chunked loss or by a fused kernel.

The kernels of other packages compute the summed cross-entropy of a linear head on CUDA without the logits of all
targets. Read in liger-kernel 0.8.5 and cut-cross-entropy 25.1.1. Both synchronize host and device once per call to
count targets, which our chunked loss does not: that is why none of them is ever chosen by default.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from finetune.config.sections.train import LossKernel
from finetune.data.batch import Batch
from finetune.registry.losses import LOSS_KERNELS, PREFERENCE_LOSSES, TOKEN_LOSSES
from finetune.registry.table import Table
from finetune.registry.tasks import ModelHead
from finetune.runtime.optional import require
from finetune.task.lm_loss import chunked_loss
from finetune.task.lm_loss.chunked_loss import (
    AUTOGRAD_LOGIT_BYTES,
    SMOOTHED_LOGIT_BYTES,
    LossSpec,
    bytes_per_logit,
    rows_per_chunk,
)
from finetune.task.lm_loss.head import (
    LmHead,
    compute_at_targets,
    find_lm_head,
    logits_at_targets,
    logits_everywhere,
    map_chunks,
    targets_of,
)
from finetune.task.lm_loss.logit_transform import LogitTransform
from finetune.task.lm_loss.token_loss import TokenLoss
from finetune.task.metrics import token_sums
from finetune.task.model_inputs import unwrap_model

FusedKernel = Callable[[Tensor, Tensor, Tensor | None, Tensor, LogitTransform], Tensor]
"""From hidden states [targets, hidden], weight, bias and labels to the summed cross-entropy, a scalar."""


def resolve_kernel(kernel: LossKernel) -> tuple[LossKernel, tuple[str, ...]]:
    """Return the kernel to use and, if that is not the configured one, a warning.

    Raises MissingPackage if there is a GPU, but the package is missing.
    """
    module = LOSS_KERNELS[kernel].module
    if module is None:
        return kernel, ()
    if not torch.cuda.is_available():
        return "chunked", (f"warning: train.loss_kernel: `{kernel}` needs a CUDA GPU; `chunked` is used.",)
    require(module, extra="kernels", purpose=f"`train.loss_kernel: {kernel}`")
    return kernel, ()


def fused_kernel_for(kernel: LossKernel, rows: Tensor, bias: Tensor | None) -> FusedKernel | None:
    """Return the configured kernel if it supports such a head; None if our own loss is used."""
    entry = LOSS_KERNELS[kernel]
    if entry.module is None or not rows.is_cuda or not len(rows) or (bias is not None and not entry.takes_bias):
        return None
    return cast(FusedKernel, LOSS_KERNELS.resolve(kernel))


def liger(rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, transform: LogitTransform) -> Tensor:
    """Return the sum by liger-kernel."""
    function: Any = require(
        cast(str, LOSS_KERNELS["liger"].module), extra="kernels", purpose="`train.loss_kernel: liger`"
    )
    settings = {"reduction": "sum", "softcap": transform.soft_cap, "accum_dtype": torch.float32}
    bias = None if bias is None else _scaled(bias, transform)
    loss = function.liger_fused_linear_cross_entropy(_scaled(rows, transform), weight, labels, bias, **settings)
    return cast(Tensor, loss.to(torch.float32))


def cce(rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, transform: LogitTransform) -> Tensor:
    """Return the sum by cut-cross-entropy, including the gradients of unlikely tokens (`filter_eps`)."""
    package: Any = require(cast(str, LOSS_KERNELS["cce"].module), extra="kernels", purpose="`train.loss_kernel: cce`")
    settings = {"reduction": "sum", "softcap": transform.soft_cap, "filter_eps": None}
    loss = package.linear_cross_entropy(_scaled(rows, transform), weight, labels, **settings)
    return cast(Tensor, loss.to(torch.float32))


def _scaled(values: Tensor, transform: LogitTransform) -> Tensor:
    return values if transform.scale == 1.0 else values * transform.scale


MAX_FULL_LOGITS = 1 << 18
"""Elements of all logits up to which `auto` computes all of them: selecting the targets takes half a millisecond."""


@dataclass(frozen=True)
class TargetLoss:
    """The loss of a model at a batch's targets."""

    loss: TokenLoss
    kernel: LossKernel = "auto"

    def sums(self, model: nn.Module, batch: Batch, inputs: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """Return `loss_sum` and, unless it is that, the detached sum of the plain `cross_entropy`."""
        labels = targets_of(batch).labels
        if self._uses_all_logits(model, batch):
            return self.loss.sums(logits_everywhere(model, batch, inputs=inputs), batch.labels)
        sums = compute_at_targets(
            model, batch, partial(_training_loss, labels=labels, loss=self.loss, kernel=self.kernel), inputs=inputs
        )
        loss_sum, plain = sums.unbind()
        return {"loss_sum": loss_sum} if self.loss.is_plain else {"loss_sum": loss_sum, "cross_entropy": plain.detach()}

    def evaluation_sums(
        self, model: nn.Module, batch: Batch, inputs: Mapping[str, Any] | None = None
    ) -> dict[str, Tensor]:
        """Return the summed cross-entropy, the number of targets and the number of those with the highest logit."""
        labels = targets_of(batch).labels
        if self._uses_all_logits(model, batch):
            return token_sums(logits_everywhere(model, batch, inputs=inputs), batch.labels)
        sums = compute_at_targets(model, batch, partial(_evaluation_sums, labels=labels), inputs=inputs)
        loss_sum, num_correct = sums.unbind()
        num_targets = torch.full((), len(labels), device=loss_sum.device)
        return {"loss_sum": loss_sum, "num_targets": num_targets, "num_correct": num_correct}

    def _uses_all_logits(self, model: nn.Module, batch: Batch) -> bool:
        """Return whether the logits of all labels are computed; `auto` does so if that is faster."""
        if self.kernel != "auto":
            return self.kernel == "plain"
        head = find_lm_head(model)
        is_small = head is not None and batch.labels.numel() * head.vocabulary <= MAX_FULL_LOGITS
        return is_small and head is not None and head.part is None


@dataclass(frozen=True)
class PluginLoss(TargetLoss):
    """A plugin's loss of a batch's targets; evaluations measure the cross-entropy, as with every other loss."""

    name: str = ""  # in the registry

    def sums(self, model: nn.Module, batch: Batch, inputs: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """Return `loss_sum` and the detached sum of the plain `cross_entropy`.

        Raises RegistryError if the plugin does not return the loss of each target.
        """
        labels, function = targets_of(batch).labels, TOKEN_LOSSES.resolve(self.name)
        if TOKEN_LOSSES[self.name].scores == "logits":
            logits = logits_at_targets(model, batch, inputs=inputs).to(torch.float32)
            plain = nn.functional.cross_entropy(logits.detach(), labels, reduction="sum")
            scores, losses = logits, function(logits, labels, batch)
        else:
            log_probabilities = log_probabilities_at_targets(model, batch, inputs=inputs)
            plain = -log_probabilities.detach().sum()
            scores, losses = log_probabilities, function(log_probabilities, labels, batch)
        require_one_loss_each(losses, [scores], name=self.name, what="target")
        return {"loss_sum": losses.to(torch.float32).sum(), "cross_entropy": plain}


def require_one_loss_each(losses: Any, scores: Sequence[Tensor], *, name: str, what: str) -> None:
    """Raise RegistryError unless the losses are a float tensor, [count], computed from scores, each [count, ...].

    Only then it is summed over all ranks and divided by their number of targets, the same under every strategy.
    """
    count = len(scores[0])
    if not isinstance(losses, Tensor):
        problem = f"a {type(losses).__name__}"
    elif losses.shape != (count,):
        mean = ", which is a mean or a sum" if losses.dim() == 0 else ""
        problem = f"a tensor of shape {list(losses.shape)}{mean}"
    elif not losses.is_floating_point():
        problem = f"a tensor of type {losses.dtype}"
    elif losses.device != scores[0].device:
        problem = f"a tensor on {losses.device}, not on {scores[0].device}"
    elif count and scores[0].requires_grad and not _depends_on(losses, scores):
        problem = "a tensor through which no gradient reaches the model (detached, or of other numbers)"
    else:
        return
    table: Table[Any] = PREFERENCE_LOSSES if what == "pair" else TOKEN_LOSSES
    raise table.refusal(
        name,
        problem,
        f"the loss of each {what}, a float tensor of shape [{count}] computed from the scores: the mean is taken once, "
        f"over the {what}s of the whole step on all processes",
    )


def _depends_on(losses: Tensor, scores: Sequence[Tensor]) -> bool:
    """Return whether some of the scores are among the tensors from which the losses were computed."""
    if not losses.requires_grad:
        return False
    ends = {get_gradient_edge(each).node for each in scores if each.requires_grad}
    nodes: list[Any] = [get_gradient_edge(losses).node]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node in ends:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [parent for parent, _ in node.next_functions]
    return False


def log_probabilities_at_targets(model: nn.Module, batch: Batch, inputs: Mapping[str, Any] | None = None) -> Tensor:
    """Return the log-probability in nats of each of the batch's targets, [targets], in float32."""
    return -compute_at_targets(model, batch, partial(_loss_of_each, labels=targets_of(batch).labels), inputs=inputs)


def _training_loss(rows: Tensor, head: LmHead, *, labels: Tensor, loss: TokenLoss, kernel: LossKernel) -> Tensor:
    """Return the loss and the cross-entropy, summed: [2]."""
    linear = head.linear_weights(rows)
    if linear is not None:
        spec = _loss_spec(rows, head, linear[0], loss, is_summed=True)
        fused_kernel = None if spec.part is not None else fused_kernel_for(kernel, rows, linear[1])
        if fused_kernel is None:
            return chunked_loss.loss_sums(head.share(rows), *linear, labels, spec)
        weight, bias = (None if each is None else each.to(spec.dtype) for each in linear)
        assert weight is not None
        return fused_kernel(rows.to(spec.dtype), weight, bias, labels, spec.transform).expand(2)
    logit_bytes = AUTOGRAD_LOGIT_BYTES if loss.is_plain else SMOOTHED_LOGIT_BYTES

    def chunk_sums(rows: Tensor, labels: Tensor) -> Tensor:
        sums = loss.sums(head.logits(rows), labels)
        return torch.stack([sums["loss_sum"], sums.get("cross_entropy", sums["loss_sum"])])

    return torch.stack(map_chunks(chunk_sums, head, rows, labels, logit_bytes=logit_bytes)).sum(dim=0)


def _loss_of_each(rows: Tensor, head: LmHead, *, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each target, [targets]."""
    linear = head.linear_weights(rows)
    if linear is not None:
        spec = _loss_spec(rows, head, linear[0], TokenLoss())
        return chunked_loss.row_losses(head.share(rows), *linear, labels, spec)[0]

    def chunk_losses(rows: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(head.logits(rows), labels, reduction="none")

    return torch.cat(map_chunks(chunk_losses, head, rows, labels))


def _evaluation_sums(rows: Tensor, head: LmHead, *, labels: Tensor) -> Tensor:
    """Return the summed cross-entropy and the number of targets with the highest logit: [2]."""
    linear = head.linear_weights(rows)
    if linear is not None:
        return chunked_loss.loss_and_num_correct(rows, *linear, labels, _loss_spec(rows, head, linear[0], TokenLoss()))

    def chunk_sums(rows: Tensor, labels: Tensor) -> Tensor:
        logits = head.logits(rows)
        loss_sum = nn.functional.cross_entropy(logits, labels, reduction="sum")
        return torch.stack([loss_sum, (logits.argmax(dim=-1) == labels).sum()])

    return torch.stack(map_chunks(chunk_sums, head, rows, labels)).sum(dim=0)


def _loss_spec(rows: Tensor, head: LmHead, weight: Tensor, loss: TokenLoss, *, is_summed: bool = False) -> LossSpec:
    assert head.transform is not None
    dtype = head.compute_dtype(rows)
    is_fused = is_summed and dtype != torch.float16 and head.part is None
    is_fused = is_fused and chunked_loss.runs_fused(rows.device, loss, head.transform)
    logit_bytes = dtype.itemsize if is_fused else bytes_per_logit(dtype, head.transform, rows.device)
    size = rows_per_chunk(len(weight), rows.device, logit_bytes=logit_bytes)
    return LossSpec(loss, head.transform, dtype, size, head.part, is_fused)


HEADS_OVER_VOCABULARY: tuple[ModelHead, ...] = ("causal_lm", "seq2seq_lm", "masked_lm", "image_text_to_text")


def fallback_warning(model: nn.Module, model_head: ModelHead, kernel: LossKernel) -> str | None:
    """Return a warning if the loss needs more memory or another kernel than configured; else None.

    `model` is the prepared model, `kernel` the result of `resolve_kernel`.
    """
    if model_head not in HEADS_OVER_VOCABULARY or kernel == "plain":
        return None
    head, name = find_lm_head(model), type(unwrap_model(model)).__name__
    entry, single_layer = LOSS_KERNELS[kernel], "a single linear layer (adapters, quantization)"
    if head is None:
        problem = f"the head of {name} cannot be located: the loss holds the logits of all positions at once"
    elif head.transform is None:
        positions = "target positions" if head.is_rowwise else "positions"
        problem = (
            f"{name} transforms the output of its head in a way not described by its config: the loss holds the logits "
            f"of all {positions} of a microbatch at once"
        )
    else:
        unsupported = {
            f"a head that is not {single_layer}": not head.is_linear,
            "a vocabulary that ranks share": head.part is not None,
            "a head with a bias": getattr(head.module, "bias", None) is not None and not entry.takes_bias,
        }
        reason = next((text for text, is_so in unsupported.items() if is_so), None)
        if entry.module is not None and reason is not None:
            return f"warning: train.loss_kernel: `{kernel}` does not support {reason}; `chunked` is used"
        if not head.is_partitioned or head.is_linear or not list(head.module.parameters()):
            return None
        problem = (
            f"the head of {name} is not {single_layer}, and ZeRO-3 gathers it once: the loss holds the logits of all "
            "targets of a microbatch at once"
        )
    prefix = "" if kernel == "auto" else f"train.loss_kernel: `{kernel}` cannot be used: "
    return f"warning: {prefix}{problem}, which needs more memory"
