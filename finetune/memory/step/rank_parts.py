"""The memory of one rank at the peak of a traced step, by part: whole parameters, FSDP2's shards, or ZeRO's engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from finetune.config.run_config import RunConfig
from finetune.memory.layout import Layout
from finetune.memory.step.trace import (
    BETWEEN,
    FIRST,
    FORWARD,
    HEAD,
    LAST,
    LOSS,
    RECOMPUTATION,
    UPDATE,
    Values,
)
from finetune.memory.step.tracer import ACTIVATIONS, GATHERED, GRADIENTS, OPTIMIZER, WEIGHTS
from finetune.model.size import AVERAGE_BYTES, Shapes, optimizer_state_bytes
from finetune.registry.model import ARITHMETIC
from finetune.strategy.upstream import zero_bucket_sizes

FORWARD_PASS, BACKWARD = (FORWARD, LOSS), (HEAD, FIRST, BETWEEN, LAST)

_PASSES = {"forward": FORWARD_PASS, "backward": BACKWARD, "recomputation": (RECOMPUTATION,)}


@dataclass(frozen=True)
class SymbolicStep:
    """A symbolic step of the whole model."""

    values: Values
    num_tokens: int
    num_merged: int  # samples that were traced as one
    config: Any  # of the model

    @cached_property
    def flops_per_token(self) -> Mapping[str, float]:
        """Return the FLOPs per token of forward pass, backward pass and recomputation."""
        return {
            name: sum(
                self.values.get(("flops", phase, "products"), 0.0)
                + self.values.get(("flops", phase, "attention"), 0.0) / self.num_merged
                for phase in phases
            )
            / self.num_tokens
            for name, phases in _PASSES.items()
        }

    @property
    def attention_flops_per_token(self) -> float:
        """Return the FLOPs per token of attention in all passes."""
        attention = (value for name, value in self.values.items() if name[0] == "flops" and name[2] == "attention")
        return sum(attention) / self.num_merged / self.num_tokens

    def bytes_of(self, category: str) -> float:
        """Return the bytes of this category at the end of the step."""
        return self.values.get(("held", category), 0.0)

    def transient(self, *phases: str) -> float:
        """Return the peak of these phases without weights, gradients and optimizer state."""
        return max(self.values.get(("transient", phase), 0.0) for phase in phases)

    @property
    def phases(self) -> tuple[str, ...]:
        """Return the phases of the step, without the creation of the model."""
        return tuple(name[1] for name in self.values if name[0] == "peak" and name[1] != "start")


def traced_parts(layout: Layout, step: SymbolicStep) -> dict[str, float]:
    """Return the memory of a rank at the peak of the step, by name."""
    if layout.strategy == "ddp":  # whose buckets allocate all gradients at construction
        held = {category: step.bytes_of(category) for category in (WEIGHTS, GRADIENTS, OPTIMIZER)}
        return {**held, ACTIVATIONS: step.transient(*step.phases)}
    peak = max(step.phases, key=lambda phase: step.values["peak", phase])
    categories = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, GATHERED)
    return {category: step.values.get(("part", peak, category), 0.0) for category in categories}


def tensor_parallel_parts(parts: Mapping[str, float], layout: Layout, shapes: Shapes | None) -> dict[str, float]:
    """Return the parts of a rank that shares every layer with others, from those of a rank that does not.

    Weights and their state are divided (norms, too, which are few). Of a layer's activations, those of heads and of the
    MLP's inner features are; the residual stream and the inputs and outputs of norms are not, about 6 tensors of the
    hidden size, and of these are the ones that recomputation keeps.
    """
    size, split = layout.tensor_size, 0.0
    if shapes is not None and not layout.gradient_checkpointing:
        inner = 2 * shapes.queries + 2 * shapes.keys + 3 * shapes.intermediate
        split = inner / (inner + 6 * shapes.hidden)
    shares = {ACTIVATIONS: 1 - split * (1 - 1 / size)}
    return {name: value * shares.get(name, 1 / size) for name, value in parts.items()}


KEPT_NUMEL = 5 * 10**8
"""Elements that ZeRO-3 keeps gathered from forward to backward pass: those used again within a billion elements
(`stage3_max_reuse_distance`), which are half as many, since each is passed twice."""

_DEFAULT_PREFETCH = 5 * 10**7


@dataclass(frozen=True)
class _Engine:
    """The sizes of one rank's engine, in bytes but for the counts."""

    stage: int
    num_ranks: int
    item: int  # of an element in weights, gradients and buffers
    num_trained: float
    bucket: float  # of gradients that are reduced together
    prefetch: float  # of parameters that are gathered together
    offloads: bool


def zero_parts(config: RunConfig, layout: Layout, step: SymbolicStep) -> dict[str, float]:
    """Return the memory of a rank at the peak of a step under ZeRO, by name.

    The trace has the weights in the precision of training, to which DeepSpeed converts them.
    """
    engine = _engine(config, layout, step)
    num_ranks, trained = engine.num_ranks, engine.num_trained
    share, weights = trained / num_ranks, step.bytes_of(WEIGHTS)
    state = optimizer_state_bytes(
        config.train.optimizer.name,
        config.train.optimizer.state_dtype,
        num_trained=round(trained),
        trained_bytes=round(4 * trained),
    )
    averages = AVERAGE_BYTES * trained if config.train.average else 0
    optimizer = 0.0 if engine.offloads else 4 * share + (state + averages) / num_ranks  # with float32 weights
    if engine.stage == 3:
        return _stage_3(engine, step, weights=weights, optimizer=optimizer)
    buffers = 2 * engine.bucket  # one is filled while the other is reduced
    forward = step.transient(*FORWARD_PASS)
    backward = buffers + max(step.transient(*BACKWARD), step.transient(LAST) + engine.item * share)
    update = (0 if engine.offloads else 4 + engine.item) * share + step.transient(UPDATE)
    parts = {WEIGHTS: weights, OPTIMIZER: optimizer}
    if backward >= max(forward, update):
        return {**parts, ACTIVATIONS: backward - buffers, GATHERED: buffers}
    return {**parts, ACTIVATIONS: forward} if forward > update else {**parts, GRADIENTS: update}


def _stage_3(engine: _Engine, step: SymbolicStep, *, weights: float, optimizer: float) -> dict[str, float]:
    """Return the parts with sharded parameters: layers are gathered while they compute, and some longer."""
    share = engine.num_trained / engine.num_ranks
    largest = step.values["largest",] * engine.item
    gathered = min(weights, KEPT_NUMEL * engine.item + largest) + min(weights, engine.prefetch)
    computing = step.transient(*FORWARD_PASS, *BACKWARD)
    update = 0.0 if engine.offloads else 4 * min(share, 1e9) + step.transient(UPDATE)
    parts = {
        WEIGHTS: 0.0 if engine.offloads else weights / engine.num_ranks,
        GRADIENTS: 0.0 if engine.offloads else engine.item * share,
        OPTIMIZER: optimizer,
    }
    if update > computing + gathered:
        return {**parts, ACTIVATIONS: update, GATHERED: engine.bucket}
    return {**parts, ACTIVATIONS: computing, GATHERED: gathered + engine.bucket}


def _engine(config: RunConfig, layout: Layout, step: SymbolicStep) -> _Engine:
    stage, item = int(layout.strategy[4]), ARITHMETIC[config.train.precision].item_bytes
    num_trained = step.values["num_trained",]
    width = getattr(step.config.get_text_config(), "hidden_size", 0) or 0
    sizes = zero_bucket_sizes(num_trained=round(num_trained), width=width, stage=stage)
    return _Engine(
        stage=stage,
        num_ranks=layout.num_ranks,
        item=item,
        num_trained=num_trained,
        bucket=item * sizes["reduce_bucket_size"],
        prefetch=item * sizes.get("stage3_prefetch_bucket_size", _DEFAULT_PREFETCH),
        offloads=layout.strategy.endswith("offload") and layout.device == "cuda",
    )
