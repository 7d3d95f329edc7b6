"""What is asked of a symbolic step, and what it answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from finetune.model.activations import CheckpointingMode

StrategyName = Literal["single", "ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"]
Method = Literal["full", "lora", "qlora"]

STRATEGIES: tuple[StrategyName, ...] = (
    *("single", "ddp", "fsdp2", "hsdp"),
    *("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"),
)


@dataclass(frozen=True)
class Layout:
    """How a job is spread and trained; everything else is the job's own."""

    strategy: StrategyName
    num_ranks: int
    method: Method
    gradient_checkpointing: CheckpointingMode
    microbatch_size: int
    ranks_per_node: int = 8  # of which HSDP makes its shards
    device: Literal["cuda", "cpu"] = "cuda"


@dataclass(frozen=True)
class Prediction:
    """The peak memory of one rank in a step, by the run of the step itself without values; bytes."""

    peak_bytes: int
    parts: Mapping[str, int] = field(default_factory=dict)  # they add up to the peak
    flops_per_token: float = 0.0  # forward and backward pass, of one token of a row, padding included
    recomputed_flops_per_token: float = 0.0  # what recomputation adds to them
    num_parameters: int = 0
    num_trained: int = 0
