"""A traced step of the whole model, and what one rank holds of it where every rank holds all, or FSDP2 shards it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from finetune.run.symbolic.prediction import Layout
from finetune.run.symbolic.trace import BETWEEN, FIRST, FORWARD, HEAD, LAST, LOSS, RECOMPUTATION, Values
from finetune.run.symbolic.tracer import ACTIVATIONS, GATHERED, GRADIENTS, OPTIMIZER, WEIGHTS

FORWARD_PASS, BACKWARD = (FORWARD, LOSS), (HEAD, FIRST, BETWEEN, LAST)

_PASSES = {"forward": FORWARD_PASS, "backward": BACKWARD, "recomputation": (RECOMPUTATION,)}


@dataclass(frozen=True)
class SymbolicStep:
    """A step of the whole model, without values."""

    values: Values
    num_tokens: int
    num_merged: int  # samples that were computed as one
    config: Any  # of the model

    @cached_property
    def flops_per_token(self) -> Mapping[str, float]:
        """Return the FLOPs of forward pass, backward pass and recomputation, of each token."""
        return {
            name: sum(
                self.values.get(("flops", phase, "products"), 0.0)
                + self.values.get(("flops", phase, "attention"), 0.0) / self.num_merged
                for phase in phases
            )
            / self.num_tokens
            for name, phases in _PASSES.items()
        }

    def bytes_of(self, kind: str) -> float:
        """Return the bytes of this kind that are there at the end of the step."""
        return self.values.get(("held", kind), 0.0)

    def transient(self, *phases: str) -> float:
        """Return the most that is alive in these phases beside weights, gradients and optimizer state."""
        return max(self.values.get(("transient", phase), 0.0) for phase in phases)

    @property
    def phases(self) -> tuple[str, ...]:
        """Return the phases of the step, without the making of its model."""
        return tuple(name[1] for name in self.values if name[0] == "peak" and name[1] != "start")


def traced_parts(layout: Layout, step: SymbolicStep) -> dict[str, float]:
    """Return what a rank holds at the peak of the step, by name."""
    if layout.strategy == "ddp":  # whose buckets hold every gradient from its construction on
        held = {kind: step.bytes_of(kind) for kind in (WEIGHTS, GRADIENTS, OPTIMIZER)}
        return {**held, ACTIVATIONS: step.transient(*step.phases)}
    peak = max(step.phases, key=lambda phase: step.values["peak", phase])
    kinds = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, GATHERED)
    return {kind: step.values.get(("part", peak, kind), 0.0) for kind in kinds}
