"""What a step takes beside weights, gradients and optimizer state, from the shapes of a decoder.

After Korthikanti et al. (2022, arXiv:2205.05198), who count what each layer saves for the backward pass, for what is
computed here: RMS norms in float32, gated MLPs, attention without scores, and a head at the targets alone.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from finetune.model.activations import CheckpointingMode
from finetune.runtime.parameters import full_numel

CONTEXT_BYTES = 600 << 20
"""Of a CUDA context, its loaded kernels and cuBLAS's workspace, outside torch's allocator."""

NCCL_BYTES = 400 << 20
"""Of NCCL's buffers and channels, outside torch's allocator, where there are several ranks."""


@dataclass(frozen=True)
class Shapes:
    """What a layer's memory follows from; a count of numbers each."""

    hidden: int
    queries: int  # numbers of all query heads of a token
    keys: int  # of all key heads; values are as many
    heads: int
    intermediate: int  # of the MLP, or of a token's experts together
    layers: int
    vocabulary: int


def read_shapes(config: Any) -> Shapes | None:
    """Return the shapes of the text model that a config describes; None where it describes none."""
    text: Any = config.get_text_config(decoder=True)
    required = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if not all(isinstance(getattr(text, name, None), int) for name in required):
        return None
    hidden, heads = text.hidden_size, text.num_attention_heads
    width = _widest(text, "head_dim") or hidden // heads
    experts = getattr(text, "num_experts_per_tok", None) or 1
    intermediate = _widest(text, "intermediate_size") or 4 * hidden
    if experts > 1:
        intermediate = experts * (getattr(text, "moe_intermediate_size", None) or intermediate)
    return Shapes(
        hidden=hidden,
        queries=heads * width,
        keys=(_widest(text, "num_key_value_heads") or heads) * width,
        heads=heads,
        intermediate=intermediate,
        layers=text.num_hidden_layers,
        vocabulary=text.vocab_size,
    )


def _widest(text: Any, name: str) -> int:
    """Return the value, of the widest layer where layers differ (Gemma 3n, Gemma 4); 0 for none."""
    layers = getattr(text, "per_layer_config", None) or (text,)
    found = [getattr(each, name, None) for each in layers]
    sizes = [size for each in found for size in (each if isinstance(each, list | tuple) else [each])]
    return max((size for size in sizes if isinstance(size, int)), default=0)


@dataclass(frozen=True)
class ForwardPass:
    """How a microbatch is computed."""

    num_tokens: int  # padding included
    longest: int  # tokens of its longest sample
    item_bytes: int  # of what matrix products compute with
    stream_bytes: int  # of what the layers add to: that of the weights
    checkpointing: CheckpointingMode = False
    offloads: bool = False
    has_scores: bool = False  # attention weights are kept, [heads, tokens, longest]
    num_adapted: int = 0  # modules of a layer with an adapter, each of which keeps a copy of its input in float32


def activation_bytes(shapes: Shapes, computed: ForwardPass) -> int:
    """Return what is saved for the backward pass, and the gradients of one layer's activations on their way."""
    layer = _layer_bytes(shapes, computed)
    stream = computed.stream_bytes * shapes.hidden
    backward = 3 * computed.item_bytes * shapes.intermediate + 2 * stream
    final_norm = 8 * shapes.hidden + 2 * stream
    layers, mode = shapes.layers, computed.checkpointing
    if computed.offloads:
        saved = 3 * layer
    elif mode == "selective":
        products = 2 * shapes.queries + 2 * shapes.keys + 2 * shapes.hidden + 2 * shapes.intermediate
        saved = layers * (stream + computed.item_bytes * products) + layer
    elif mode:
        checkpointed = -(-layers // int(mode))
        saved = checkpointed * stream + (layers - checkpointed + 1) * layer
    else:
        saved = layers * layer
    return computed.num_tokens * (saved + backward + final_norm)


def _layer_bytes(shapes: Shapes, computed: ForwardPass) -> int:
    """Return what one layer saves of a token.

    A norm in float32 saves its input and what it multiplies by the weight. Under autocast, each product that reads the
    float32 stream saves a copy of its own: query, key and value three, gate and up two.
    """
    item, is_cast = computed.item_bytes, computed.item_bytes != computed.stream_bytes
    norms = 2 * (4 + computed.stream_bytes) * shapes.hidden
    inputs = (5 if is_cast else 2) * item * shapes.hidden
    attention = item * (2 * shapes.queries + 2 * shapes.keys) + 4 * shapes.heads
    scores = 2 * item * shapes.heads * computed.longest if computed.has_scores else 0
    adapters = 4 * computed.num_adapted * shapes.hidden
    return norms + inputs + attention + scores + adapters + 4 * item * shapes.intermediate


def loss_bytes(
    shapes: Shapes,
    computed: ForwardPass,
    *,
    chunk_rows: int,
    logit_bytes: int,
    full_logits: int,
    trains_head: bool,
) -> int:
    """Return what the loss takes: logits of one chunk of rows, or of all where they are few; the head's own copies.

    The gradients of hidden states and head are computed with the loss, before the backward pass.
    """
    num_tokens, item = computed.num_tokens, computed.item_bytes
    if num_tokens * shapes.vocabulary <= full_logits:
        return 3 * 4 * num_tokens * shapes.vocabulary
    head = shapes.vocabulary * shapes.hidden
    copies = (item if item != computed.stream_bytes else 0) * head + (4 * head if trains_head else 0)
    logits = logit_bytes * min(chunk_rows, num_tokens) * shapes.vocabulary
    return logits + copies + 2 * 4 * num_tokens * shapes.hidden


def autocast_bytes(model: nn.Module, *, checkpoints: bool) -> int:
    """Return the bytes of float32 weights that autocast copies to 16 bits: of every matrix but embeddings.

    Copies of trained weights are cached to the end of the forward pass, all are kept for the backward pass; frozen ones
    of a recomputed layer exist only with it.
    """
    found = 0
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            continue
        for parameter in module.parameters(recurse=False):
            is_copied = len(parameter.shape) > 1 and parameter.element_size() == 4
            if is_copied and (parameter.requires_grad or not checkpoints):
                found += 2 * full_numel(parameter)
    return found


def gathered_bytes(model: nn.Module, *, num_layers: int, item_bytes: int, gradient_bytes: int) -> int:
    """Return what is whole at a time where parameters are sharded: two layers, what is in none, and their gradients.

    Each exists twice: as it is sent or received, and as the modules have it.
    """
    total = sum(full_numel(each) for each in model.parameters())
    trained = sum(full_numel(each) for each in model.parameters() if each.requires_grad)
    embeddings = [
        each for module in model.modules() if isinstance(module, nn.Embedding) for each in module.parameters()
    ]
    outside = min(total, sum(map(full_numel, embeddings)))
    whole = 2 * (total - outside) / max(1, num_layers) + outside
    return round(2 * whole * (item_bytes + gradient_bytes * trained / max(1, total)))


def library_bytes(*, has_device: bool, num_processes: int) -> int:
    """Return what CUDA, its libraries and NCCL take of a GPU's memory; nothing on a CPU."""
    if not has_device:
        return 0
    return CONTEXT_BYTES + (NCCL_BYTES if num_processes > 1 else 0)
