"""Counts the rows of logits that matrix products make, whatever computes them: the model itself, our loss, a kernel."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = (
    *("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "_scaled_mm", "mkldnn_rnn_layer"),
    *("plus_product", "linear_plus_product"),  # of `model/adapters/single_pass.py`
)


@dataclass
class HeadRows(TorchDispatchMode):
    """In this context, counts the rows of every product whose result is as wide as the vocabulary, by forward pass.

    Nothing else may be of that width. `outside` are the rows of backward passes, in which chunks are recomputed.
    """

    vocabulary: int
    forwards: list[int] = field(default_factory=list)
    outside: int = 0
    largest: int = 0  # rows of the largest tensor of that width
    _is_inside: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, operation: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        outputs = operation(*given, **(named or {}))
        if operation.is_view:  # such as the weights, transposed
            return outputs
        for each in outputs if isinstance(outputs, tuple | list) else (outputs,):
            if isinstance(each, Tensor) and each.dim() > 1 and each.shape[-1] == self.vocabulary:
                self._count(each.numel() // self.vocabulary, operation.__name__.split(".")[0])
        return outputs

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Count what lies within forward passes of the model by itself."""

        def before(*_: Any) -> None:
            self.forwards.append(0)
            self._is_inside = True

        def after(*_: Any) -> None:
            self._is_inside = False

        with model.register_forward_pre_hook(before), model.register_forward_hook(after):
            yield

    def _count(self, rows: int, name: str) -> None:
        self.largest = max(self.largest, rows)
        if name not in PRODUCTS:
            return
        if self._is_inside:
            self.forwards[-1] += rows
        else:
            self.outside += rows
