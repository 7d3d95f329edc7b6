"""The head of a language model: locates it inside all wrappers and intercepts its forward pass."""

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from finetune.runtime.parallel.tensor import SplitHead, VocabularyPart
from finetune.task.lm_loss.chunked_loss import AUTOGRAD_LOGIT_BYTES, rows_per_chunk
from finetune.task.lm_loss.logit_transform import LogitTransform, find_logit_transform, is_rowwise
from finetune.task.model_inputs import unwrap_model
from finetune.task.upstream import replaced_forward

Forward = Callable[[Tensor], Tensor]
Interceptor = Callable[[Tensor, Forward], Tensor]
"""Computes the head's output from its input and its own forward."""


class LmHead:
    """The module that produces logits over a vocabulary, and the model's transform of its output."""

    def __init__(self, module: nn.Module, transform: LogitTransform | None, *, is_rowwise: bool) -> None:
        """`transform` is None if it is unknown; `is_rowwise`: the model transforms every row independently."""
        self.module = module
        self.transform = transform
        self.is_rowwise = is_rowwise
        self.vocabulary = int(getattr(module, "out_features", sys.maxsize))
        self._own_forward: Forward = module.forward
        self._interceptor: Interceptor | None = None
        self._forward: Callable[..., Tensor] = self._intercepted
        if "torch._dynamo" in sys.modules:  # it differs between forward passes: not to be compiled
            self._forward = torch.compiler.disable(self._intercepted)  # type: ignore[no-untyped-call]  # torch has no types for it

    @classmethod
    def of_logits(cls) -> "LmHead":
        """Return a head whose input is already logits."""
        return cls(nn.Identity(), LogitTransform(), is_rowwise=True)

    def linear_weights(self, rows: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Return weight and bias if the head is a plain linear layer for such rows, else None.

        A layer with LoRA, quantized weights or sharded weights is not plain. Of a split vocabulary, they are this
        rank's part.
        """
        weight: Any = getattr(self.module, "weight", None)
        is_plain = getattr(self._own_forward, "__func__", None) is nn.Linear.forward
        is_plain = is_plain and type(weight) in (Tensor, nn.Parameter, FakeTensor)
        if not is_plain and self.part is None:
            return None
        if weight.dtype != rows.dtype and self.compute_dtype(rows) == rows.dtype:
            return None
        bias = cast(Any, self.module.bias)
        if self.part is not None:
            return weight.to_local(), None if bias is None else bias.to_local()
        return weight, bias

    @property
    def part(self) -> VocabularyPart | None:
        """Return this rank's part of the vocabulary; None if the weights are those of all of it."""
        if not isinstance(self.module, SplitHead):
            return None
        mesh, size = self.module.mesh, self.vocabulary // self.module.mesh.size()
        return VocabularyPart(mesh.get_group(), size * mesh.get_local_rank(), size=size, total=self.vocabulary)

    def share(self, rows: Tensor) -> Tensor:
        """Return the hidden states for the rank's own weights; with a split vocabulary, ranks sum their gradient."""
        return self.module.share(rows) if isinstance(self.module, SplitHead) else rows

    @property
    def is_partitioned(self) -> bool:
        """Return whether the weights are gathered only during the head's forward (ZeRO-3), or there are none."""
        parameters = list(self.module.parameters())
        return not parameters or any(hasattr(parameter, "ds_id") for parameter in parameters)

    @property
    def is_linear(self) -> bool:
        """Return whether the module is a single linear layer; layers with LoRA and quantized layers are not."""
        return getattr(self.module.forward, "__func__", None) in (nn.Linear.forward, SplitHead.forward)

    @staticmethod
    def compute_dtype(rows: Tensor) -> torch.dtype:
        """Return the dtype in which a linear layer would compute these rows."""
        device = rows.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits of hidden states, [rows, vocabulary], in float32, as the module itself computes them."""
        assert self.transform is not None
        return self.transform.apply(self._own_forward(rows).to(torch.float32))

    @contextmanager
    def intercept(self, interceptor: Interceptor) -> Iterator[None]:
        """Replace the module's forward by the interceptor in this context."""
        self._own_forward, self._interceptor = self.module.forward, interceptor
        try:
            with replaced_forward(self.module, self._forward):
                yield
        finally:
            self._interceptor = None

    def _intercepted(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        assert self._interceptor is not None
        return self._interceptor(hidden, self._own_forward)


def map_chunks(
    function: Callable[..., Tensor],
    head: LmHead,
    rows: Tensor,
    *others: Tensor,
    logit_bytes: int = AUTOGRAD_LOGIT_BYTES,
) -> list[Tensor]:
    """Return the results of `function` over chunks of the rows and of the tensors `others`, which have one row per row.

    The logits are recomputed in the backward pass. It supports any loss and heads that are not plain linear layers,
    such as with LoRA; `logit_bytes` is the peak memory per logit of a chunk. Weights that ZeRO-3 has partitioned are
    gathered once for all rows.
    """
    size = len(rows)
    if not head.is_partitioned:
        size = rows_per_chunk(head.vocabulary, rows.device, logit_bytes=logit_bytes)
    if len(rows) <= size:
        return [function(rows, *others)]
    parts = zip(*(torch.split(tensor, size) for tensor in (rows, *others)), strict=True)
    return [checkpoint(function, *part, use_reentrant=False) for part in parts]


_HEADS: "weakref.WeakKeyDictionary[nn.Module, LmHead]" = weakref.WeakKeyDictionary()


def find_lm_head(model: nn.Module) -> LmHead | None:
    """Return the head of the model inside all wrappers; None if it has no head over a vocabulary.

    The transform of its output is determined in the first call for a model.
    """
    inner: Any = unwrap_model(model)
    try:
        module: nn.Module | None = inner.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        module = None
    if module is None:
        return None
    head = _HEADS.get(inner)
    if head is None or head.module is not module:
        transform = find_logit_transform(inner, module)
        head = LmHead(module, transform, is_rowwise=transform is not None or is_rowwise(inner, module))
        _HEADS[inner] = head
    return head
