"""The head of a language model, found inside all wrappers, and its forward pass intercepted."""

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from finetune.task.lm_loss.chunked_loss import rows_per_chunk
from finetune.task.lm_loss.logit_transform import HeadOutput, LogitTransform, find_logit_transform
from finetune.task.model_inputs import unwrap_model

Forward = Callable[[Tensor], Tensor]
Interceptor = Callable[[Tensor, Forward], Tensor]
"""From what the head is given, and its own forward, to what it answers."""


class LmHead:
    """What makes logits over a vocabulary, and what becomes of them on their way out of the model."""

    def __init__(self, module: nn.Module, output: HeadOutput) -> None:
        self.module = module
        self.finish: LogitTransform | None = output.finish
        self.keeps_rows = output.keeps_rows
        self.vocabulary = int(getattr(module, "out_features", sys.maxsize))
        self._own: Forward = module.forward
        self._hear: Interceptor | None = None
        self._listen = _uncompiled(self._heard)

    @classmethod
    def of_logits(cls) -> "LmHead":
        """Return a head whose input are logits already."""
        return cls(nn.Identity(), HeadOutput(LogitTransform(), keeps_rows=True))

    def linear_weights(self, rows: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Return weight and bias where the head is a plain linear map of such rows; None else.

        It is none as a layer of LoRA, quantised, or with weights that a wrapper has cut to pieces.
        """
        weight: Any = getattr(self.module, "weight", None)
        if getattr(self._own, "__func__", None) is not nn.Linear.forward or type(weight) not in (Tensor, nn.Parameter):
            return None
        if weight.dtype != rows.dtype and self.compute_dtype(rows) == rows.dtype:
            return None
        return weight, cast(Any, self.module.bias)

    @property
    def is_partitioned(self) -> bool:
        """Tell whether the weights are whole only while a pass goes through the head (ZeRO-3), or there are none."""
        parameters = list(self.module.parameters())
        return not parameters or any(hasattr(each, "ds_id") for each in parameters)

    @staticmethod
    def compute_dtype(rows: Tensor) -> torch.dtype:
        """Return the dtype in which a linear map of the rows would be worked out."""
        device = rows.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits of hidden states, [rows, vocabulary], in float32, as the module itself makes them."""
        assert self.finish is not None
        return self.finish.of(self._own(rows).to(torch.float32))

    @contextmanager
    def intercept(self, hear: Interceptor) -> Iterator[None]:
        """Have `hear` answer for the module meanwhile."""
        attributes = self.module.__dict__
        before = attributes.get("forward")
        self._own, self._hear = self.module.forward, hear
        attributes["forward"] = self._listen
        try:
            yield
        finally:
            self._hear = None
            if before is None:
                del attributes["forward"]
            else:
                attributes["forward"] = before

    def _heard(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        assert self._hear is not None
        return self._hear(hidden, self._own)


def map_chunks(work: Callable[..., Tensor], head: LmHead, rows: Tensor, *others: Tensor) -> list[Tensor]:
    """Return what `work` makes of rows and of what belongs to them, as many at a time as a slab has.

    Their logits are made again in the backward pass. It is for a head that is no plain linear map, such as one with
    LoRA, and for losses of any kind. Weights that ZeRO-3 has cut to pieces are gathered once, for all rows.
    """
    size = len(rows) if head.is_partitioned else rows_per_chunk(head.vocabulary, rows.device)
    if len(rows) <= size:
        return [work(rows, *others)]
    parts = zip(*(torch.split(each, size) for each in (rows, *others)), strict=True)
    return [checkpoint(work, *part, use_reentrant=False) for part in parts]


_HEADS: "weakref.WeakKeyDictionary[nn.Module, LmHead]" = weakref.WeakKeyDictionary()


def find_lm_head(model: nn.Module) -> LmHead | None:
    """Return the head of the model inside all wrappers; None where it has none over a vocabulary.

    What becomes of its output is found out when it is first asked for.
    """
    inner: Any = unwrap_model(model)
    module = _output_embeddings(inner)
    if module is None:
        return None
    known = _HEADS.get(inner)
    if known is None or known.module is not module:
        known = _HEADS[inner] = LmHead(module, find_logit_transform(inner, module))
    return known


def _output_embeddings(model: Any) -> nn.Module | None:
    """Return what makes logits over a vocabulary; None where nothing does, or the model knows of nothing."""
    try:
        found: nn.Module | None = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return found


def _uncompiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function as one that a compiler leaves alone, where one is loaded: it changes from pass to pass."""
    if "torch._dynamo" not in sys.modules:
        return function
    uncompiled: Callable[..., Tensor] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]  # torch has no types for it
    return uncompiled
