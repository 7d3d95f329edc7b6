"""The distribution of a job over ranks, and the predicted memory of one of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from finetune.config.rules.model import adapter_of
from finetune.config.run_config import RunConfig
from finetune.model.activations import CheckpointingMode

DataParallelName = Literal[
    "single", "ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"
]
TensorParallelName = Literal["tensor_parallel", "fsdp2_tensor_parallel"]
StrategyName = DataParallelName | TensorParallelName
Method = Literal["full", "lora", "qlora"]

STRATEGIES: tuple[DataParallelName, ...] = get_args(DataParallelName)
"""The strategies that a plan compares; tensor parallelism is planned where none of them can run the job."""


@dataclass(frozen=True)
class Layout:
    """Strategy, ranks and method of a job; everything else is in its config."""

    strategy: StrategyName
    num_ranks: int
    method: Method
    gradient_checkpointing: CheckpointingMode
    microbatch_size: int
    ranks_per_node: int = 8  # the shards of HSDP
    device: Literal["cuda", "cpu"] = "cuda"
    tensor_size: int = 1  # ranks that share every layer and compute the same microbatch

    @property
    def num_groups(self) -> int:
        """Return the number of microbatches that are computed in parallel."""
        return self.num_ranks // self.tensor_size


@dataclass(frozen=True)
class Prediction:
    """The peak memory of one rank in a step in bytes, from running the step itself without values."""

    peak_bytes: int
    parts: Mapping[str, int] = field(default_factory=dict)  # they add up to the peak
    flops_per_token: float = 0.0  # forward and backward pass, of one token of a row, padding included
    recomputed_flops_per_token: float = 0.0  # added by recomputation
    attention_flops_per_token: float = 0.0  # of both, those of attention
    num_adapted_features: int = 0  # inputs and outputs of all layers with an adapter
    num_parameters: int = 0
    num_trained: int = 0


def method_of(config: RunConfig) -> Method:
    """Return the training method of a job: all weights, or adapters on a frozen base, which may be quantized."""
    if config.model.quantization is not None:
        return "qlora"
    return "full" if adapter_of(config) is None else "lora"
