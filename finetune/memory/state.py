"""The distribution of a job over ranks, and the prediction of a rank's memory at the start.

Weights, gradients and optimizer state are counted, activations are not: `finetune plan` traces the job's symbolic step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from finetune.config.rules.model import adapter_of
from finetune.config.run_config import RunConfig
from finetune.model.activations import CheckpointingMode
from finetune.model.size import AVERAGE_BYTES, ModelSize, optimizer_state_bytes
from finetune.runtime.resources import format_size
from finetune.strategy.protocol import Sharded, Strategy
from finetune.train.meters import peak_memory_bytes
from finetune.train.plan import StepPlan

DataParallelName = Literal[
    "single", "ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"
]
TensorParallelName = Literal["tensor_parallel", "fsdp2_tensor_parallel"]
StrategyName = DataParallelName | TensorParallelName
Method = Literal["full", "lora", "qlora"]

STRATEGIES: tuple[DataParallelName, ...] = get_args(DataParallelName)
"""The strategies that a plan compares; tensor parallelism is planned where none of them can run the job."""


@dataclass(frozen=True)
class TrainingLayout:
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
    attention_flops_per_token: float = 0.0  # of both, the share of attention
    num_adapted_features: int = 0  # inputs and outputs of all layers with an adapter
    num_parameters: int = 0
    num_trained: int = 0


def method_of(config: RunConfig) -> Method:
    """Return the training method of a job: all weights, or adapters on a frozen base, which may be quantized."""
    if config.model.quantization is not None:
        return "qlora"
    return "full" if adapter_of(config) is None else "lora"


_CPU_STATE_FACTOR, _CPU_MIN_BYTES = 4, 1 << 30


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    process_bytes: int = 0  # without a model; on a CPU, where resident memory is measured
    unsharded_gradient_bytes: int = 0  # kept between the microbatches of a step in addition to the shard
    copy_bytes: int = 0  # of checkpoints that are written in the background; on a CPU, where it is resident memory
    has_teacher: bool = False  # whose size is reported separately

    @property
    def state_bytes(self) -> int:
        """Return the sum of weights, gradients and optimizer state."""
        return self.weights_bytes + self.gradients_bytes + self.unsharded_gradient_bytes + self.optimizer_bytes

    @property
    def line(self) -> str:
        """Return a line with the prediction and its parts."""
        parts = {
            "weights": self.weights_bytes,
            "gradients": self.gradients_bytes,
            "optimizer state": self.optimizer_bytes,
            "unsharded gradient": self.unsharded_gradient_bytes,
            "process": self.process_bytes,
            "checkpoint copy": self.copy_bytes,
        }
        always = ("weights", "gradients", "optimizer state")
        counted = " + ".join(f"{name} {format_size(size)}" for name, size in parts.items() if size or name in always)
        advice = "; `checkpoint.asynchronous: false` needs no copy" if self.copy_bytes else ""
        excluded = "the teacher and activations" if self.has_teacher else "activations"
        total = format_size(self.state_bytes + self.process_bytes + self.copy_bytes)
        return f"memory: {total} per rank = {counted}, without {excluded} (`finetune plan` predicts the peak){advice}"

    @property
    def peak_line(self) -> str:
        """Return a line with the prediction and this rank's peak so far."""
        peak = peak_memory_bytes()
        if torch.cuda.is_available():  # with the memory in use outside torch's allocator
            free, total = torch.cuda.mem_get_info()
            peak += max(0, total - free - torch.cuda.memory_reserved())
        counted = f"weights, gradients and optimizer state {format_size(self.state_bytes)}"
        return f"memory: {counted}, measured peak {format_size(peak)}"

    @property
    def ample_cpu_bytes(self) -> int:
        """Return the free memory with which a step on a CPU is assumed to fit with any activations."""
        return _CPU_STATE_FACTOR * (_CPU_STATE_FACTOR * self.state_bytes + _CPU_MIN_BYTES)


def count_state(
    config: RunConfig, strategy: Strategy, *, size: ModelSize, process_bytes: int, unsharded_gradient_bytes: int = 0
) -> RankMemory:
    """Return the memory of one rank: weights, gradients and optimizer state, divided if the strategy shards them."""
    train, distillation, is_zero = config.train, config.task.distillation, strategy.name.startswith("zero")
    trained_bytes = sum(size.trained_bytes_by_dtype.values())
    optimizer_bytes = optimizer_state_bytes(
        train.optimizer.name,
        train.optimizer.state_dtype,
        num_trained=size.num_trained,
        trained_bytes=max(trained_bytes, 4 * size.num_trained) if is_zero else trained_bytes,
    )
    if is_zero:
        optimizer_bytes += 4 * size.num_trained  # float32 copies in the optimizer
    if train.average:
        optimizer_bytes += AVERAGE_BYTES * size.num_trained
    saved_bytes = optimizer_bytes + (0 if is_zero else trained_bytes)
    is_copied = process_bytes > 0 and config.checkpoint.asynchronous
    keeps_half = is_zero and train.precision != "fp32"  # DeepSpeed keeps weights in the precision of training

    def stored(by_dtype: Mapping[str, int]) -> int:
        return sum(size // 2 if keeps_half and dtype == "float32" else size for dtype, size in by_dtype.items())

    gradients_bytes = size.largest_trained_bytes if train.optimizer.in_backward else stored(size.trained_bytes_by_dtype)

    def share(total: int, sharded: Sharded) -> int:
        if sharded not in strategy.sharded:
            return total
        whole = round(total * size.whole_share)
        expected = strategy.expected
        return -(-whole * expected.tensor_size // expected.num_shards) - (whole - total) // expected.num_shards

    return RankMemory(
        weights_bytes=share(stored(size.bytes_by_dtype), Sharded.PARAMETERS),
        gradients_bytes=share(gradients_bytes, Sharded.GRADIENTS),
        optimizer_bytes=share(optimizer_bytes, Sharded.OPTIMIZER),
        process_bytes=process_bytes,
        unsharded_gradient_bytes=unsharded_gradient_bytes,
        copy_bytes=saved_bytes // strategy.expected.num_processes if is_copied else 0,  # each rank writes a share
        has_teacher=distillation is not None and not distillation.cache,
    )


PredictMemory = Callable[[StepPlan | None], RankMemory]
"""The memory of a rank under a plan; with `train.microbatch_size: auto` the plan is known only later."""


def predict_memory(
    config: RunConfig, strategy: Strategy, *, size: ModelSize, process_bytes: int, unsharded_gradient_bytes: int = 0
) -> PredictMemory:
    """Return a function that counts a rank's memory for a plan.

    `unsharded_gradient_bytes` are those of accumulated gradients.
    """

    def predict(plan: StepPlan | None) -> RankMemory:
        accumulates = plan is not None and plan.num_batches > 1
        unsharded = unsharded_gradient_bytes if accumulates else 0
        return count_state(config, strategy, size=size, process_bytes=process_bytes, unsharded_gradient_bytes=unsharded)

    return predict
