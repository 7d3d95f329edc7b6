"""The floor: the matrix products and the attention that a step's targets need, alone, at the shapes of the workload.

A step of the floor does what no trainer of this model can leave out: the products of every linear layer over the tokens
that are no padding (forward, gradient of the input, gradient of the weight where it is trained), causal attention
within each document (forward and backward), and the head at target positions. It does nothing else: no norms, rotary
embeddings, gates, loss, optimizer, clipping or data, and no layer hands anything to the next. Operands are random and
stay the same; products write into buffers that exist. So `ours / floor` says how much is left to win.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from comparison.data import Documents
from comparison.worker import Worker
from comparison.workloads import Workload


def compute(model: Any, documents: Documents, workload: Workload, worker: Worker) -> None:
    """Take the steps of the workload."""
    config, layers, head = model.config, _linear_layers(model), model.get_output_embeddings()
    attention = Attention(config.num_attention_heads, config.num_key_value_heads, config.hidden_size)
    batches = [range(number * workload.batch, (number + 1) * workload.batch) for number in range(workload.steps)]
    lengths = [[int(documents.lengths[i]) for i in batch] for batch in batches]
    targets = [int(documents.is_target[documents.offsets[b[0]] : documents.offsets[b[-1] + 1]].sum()) for b in batches]
    products = Products([*layers, head], most_rows=max(map(sum, lengths)))
    for sizes, num_targets in zip(lengths, targets, strict=True):
        worker.wait()
        for layer in layers:
            products.compute(layer, rows=sum(sizes))
        products.compute(head, rows=num_targets)
        for _ in range(config.num_hidden_layers):
            attention.compute(sizes)
        worker.count(tokens=sum(sizes), targets=num_targets)


def _linear_layers(model: Any) -> list[nn.Linear]:
    """Return the linear layers, those of adapters included, and not the head."""
    head = model.get_output_embeddings()
    return [each for each in model.modules() if isinstance(each, nn.Linear) and each is not head]


class Products:
    """The matrix products of linear layers, on operands and into buffers that exist beforehand."""

    def __init__(self, layers: list[nn.Linear], *, most_rows: int) -> None:
        sizes = {size for layer in layers for size in (layer.in_features, layer.out_features)}
        self._operands = {size: torch.randn(most_rows, size) for size in sizes}
        self._buffers = {size: torch.empty(most_rows, size) for size in sizes}
        self._gradients = {layer.weight.shape: torch.empty_like(layer.weight, requires_grad=False) for layer in layers}

    @torch.no_grad()
    def compute(self, layer: nn.Linear, *, rows: int) -> None:
        """Compute the output, the input's gradient and, where the weight is trained, its gradient."""
        weight, inputs, outputs = layer.weight, layer.in_features, layer.out_features
        x, gradient = self._operands[inputs][:rows], self._operands[outputs][:rows]
        torch.mm(x, weight.T, out=self._buffers[outputs][:rows])
        torch.mm(gradient, weight, out=self._buffers[inputs][:rows])
        if weight.requires_grad:
            torch.mm(gradient.T, x, out=self._gradients[weight.shape])


class Attention:
    """Causal attention of one layer within each document, forward and backward; documents of one length in one call."""

    def __init__(self, heads: int, key_heads: int, width: int) -> None:
        self._heads = (heads, key_heads, key_heads)
        self._width = width // heads
        self._operands: dict[tuple[int, int], list[Tensor]] = {}

    def compute(self, lengths: list[int]) -> None:
        """Compute the outputs and the gradients of queries, keys and values."""
        for length in set(lengths):
            query, key, value, gradient = self._drawn(lengths.count(length), length)
            output = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            torch.autograd.grad(output, (query, key, value), gradient)

    def _drawn(self, count: int, length: int) -> list[Tensor]:
        if (count, length) not in self._operands:
            shapes = [(count, heads, length, self._width) for heads in (*self._heads, self._heads[0])]
            drawn = [torch.randn(shape) for shape in shapes]
            self._operands[count, length] = [*(each.requires_grad_() for each in drawn[:3]), drawn[3]]
        return self._operands[count, length]
