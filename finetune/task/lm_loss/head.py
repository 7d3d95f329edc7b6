"""The head of a language model: located inside all wrappers, and intercepted to compute functions at the targets.

For one forward pass, the head is intercepted: it selects the rows of the targets and computes the function while its
weights are gathered, so that no wrapper (DDP, FSDP2, ZeRO-3, peft) is bypassed.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from finetune.data.batch import Batch, Targets
from finetune.runtime.parallel import SplitHead, VocabularyPart
from finetune.task.lm_loss.chunked_loss import AUTOGRAD_LOGIT_BYTES, rows_per_chunk
from finetune.task.lm_loss.logit_transform import LogitTransform, find_logit_transform, is_rowwise
from finetune.task.model_inputs import forward_inputs, unwrap_model
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
        """Return this rank's part of the vocabulary; None if the weights cover all of it."""
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
    *extras: Tensor,
    logit_bytes: int = AUTOGRAD_LOGIT_BYTES,
) -> list[Tensor]:
    """Return the results of `function` over chunks of the rows and of the tensors `extras`, which have one row per row.

    The logits are recomputed in the backward pass. It supports any loss and heads that are not plain linear layers,
    such as with LoRA; `logit_bytes` is the peak memory per logit of a chunk. Weights that ZeRO-3 has partitioned are
    gathered once for all rows.
    """
    size = len(rows)
    if not head.is_partitioned:
        size = rows_per_chunk(head.vocabulary, rows.device, logit_bytes=logit_bytes)
    if len(rows) <= size:
        return [function(rows, *extras)]
    parts = zip(*(torch.split(tensor, size) for tensor in (rows, *extras)), strict=True)
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


TargetFunction = Callable[[Tensor, LmHead], Tensor]
"""From the hidden states at the targets, [targets, hidden], and the head to a float32 tensor of any shape."""


def logits_at_targets(model: nn.Module, batch: Batch, *, inputs: Mapping[str, Any] | None = None) -> Tensor:
    """Return the logits at the batch's targets, [targets, vocabulary].

    `inputs` replaces the default inputs of the model, `forward_inputs(model, batch)`.
    """
    head = find_lm_head(model)
    if head is None or not head.is_rowwise:
        return _select_targets(logits_everywhere(model, batch, inputs=inputs), batch)
    inputs = forward_inputs(model, batch) if inputs is None else inputs
    request = _Request(targets_of(batch), tuple(batch.labels.shape))
    with head.intercept(request.select):
        logits: Tensor = model(**inputs).logits
    return logits[0] if request.was_served else _select_targets(logits, batch)


def logits_everywhere(model: nn.Module, batch: Batch, *, inputs: Mapping[str, Any] | None = None) -> Tensor:
    """Return the logits of all labels, [batch, length, vocabulary]; prompt tuning's positions come before the text."""
    logits: Tensor = model(**(forward_inputs(model, batch) if inputs is None else inputs)).logits
    return _last_positions(logits, batch.labels.shape[1])


def compute_at_targets(
    model: nn.Module, batch: Batch, function: TargetFunction, *, inputs: Mapping[str, Any] | None = None
) -> Tensor:
    """Return the function of the batch's targets, computed in the head's forward, or else from their logits."""
    head = find_lm_head(model)
    if head is None or head.transform is None:
        return function(logits_at_targets(model, batch, inputs=inputs), LmHead.of_logits())
    inputs = forward_inputs(model, batch) if inputs is None else inputs
    request = _Request(targets_of(batch), tuple(batch.labels.shape), head, function)
    with head.intercept(request.compute_in_head):
        placeholder: Tensor = model(**inputs).logits
    if request.was_served:
        result: Tensor = _FetchResult.apply(placeholder, request)  # type: ignore[no-untyped-call]  # torch has no types for it
        return result
    return function(_select_targets(placeholder, batch), LmHead.of_logits())


@dataclass
class _Request:
    """The computation of one forward pass.

    It carries the result around the model's outputs, which may be cast to half precision, and its gradient back.
    """

    targets: Targets
    shape: tuple[int, ...]  # of the labels
    head: LmHead | None = None
    function: TargetFunction | None = None
    was_served: bool = False
    result: Tensor | None = None
    gradient: Tensor | None = None

    def select(self, hidden: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the head's output at the targets, [1, targets, vocabulary]; at all positions for an unknown shape."""
        rows = self._rows(hidden)
        return forward(hidden) if rows is None else forward(rows[None])

    def compute_in_head(self, hidden: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a placeholder for the logits and keep the result; the head's output for an unknown shape."""
        rows = self._rows(hidden)
        if rows is None:
            return forward(hidden)
        assert self.function is not None and self.head is not None
        placeholder: Tensor = _StoreResult.apply(self.function(rows, self.head), self)  # type: ignore[no-untyped-call]  # likewise
        return placeholder

    def _rows(self, hidden: Tensor) -> Tensor | None:
        num_rows, length = self.shape
        if hidden.dim() == 3 and hidden.shape[0] == num_rows and hidden.shape[1] >= length:
            hidden = _last_positions(hidden, length)  # positions of prompt tuning come first
        elif hidden.dim() != 2 or hidden.shape[0] != num_rows * length:
            return None
        self.was_served = True
        flat, positions = hidden.reshape(-1, hidden.shape[-1]), self.targets.positions
        return flat if len(positions) == len(flat) else flat.index_select(0, positions)


class _StoreResult(torch.autograd.Function):
    """Puts the result into the request and sends a zero through the model in its place."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, request: _Request) -> Tensor:
        request.result, ctx.request = value, request
        return value.new_zeros(1, 1, 1)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, None]:
        return ctx.request.gradient, None


class _FetchResult(torch.autograd.Function):
    """Takes the result out of the request where the zero comes out of the model."""

    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, request: _Request) -> Tensor:
        assert request.result is not None
        ctx.request, ctx.placeholder = request, placeholder.new_zeros(()).expand(placeholder.shape)
        return request.result.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (ctx.request.gradient,) = upstream
        return ctx.placeholder, None


def _last_positions(positions: Tensor, length: int) -> Tensor:
    """Return the last `length` positions, without slicing if these are all, since its backward copies the gradient."""
    return positions if positions.shape[1] == length else positions[:, positions.shape[1] - length :]


def targets_of(batch: Batch) -> Targets:
    """Return the targets of a batch of tokens."""
    assert batch.targets is not None, "a batch of tokens has targets"
    return batch.targets


def _select_targets(logits: Tensor, batch: Batch) -> Tensor:
    """Return the rows of the targets; prompt tuning's positions come before the text's."""
    text = _last_positions(logits, batch.labels.shape[1])
    return text.flatten(0, -2).index_select(0, targets_of(batch).positions)
