"""The memory and the FLOPs of a job's step under any strategy, before any weight is loaded.

The job's own step runs on tensors without values and few of the model's layers: memory and FLOPs are linear in their
number. FSDP2 runs in a process group that sends nothing. DeepSpeed's engine cannot run without values: for ZeRO, its
buffers and gathered weights are added to the memory of the same step.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from finetune.config.run_config import RunConfig
from finetune.config.sections.data import DataSection
from finetune.errors import FinetuneError, ModelError
from finetune.memory.layout import Layout, Prediction
from finetune.memory.step.fake_model import empty_model, make_trainable, with_method
from finetune.memory.step.inputs import is_token_task, largest_batch, symbolic_task, tokens_of
from finetune.memory.step.rank_parts import SymbolicStep, traced_parts, zero_parts
from finetune.memory.step.trace import BETWEEN, Sharding, Values, trace_step
from finetune.model.layers import (
    KeptLayers,
    can_be_extrapolated,
    fewest_layers,
    find_stacks,
    with_layers,
    with_one_more,
)
from finetune.model.size import optimizer_state_bytes
from finetune.task.model_inputs import is_padding_free, unwrap_model

CONTEXT_BYTES = 600 << 20
"""Of a CUDA context, its loaded kernels and cuBLAS's workspace, outside torch's allocator."""

NCCL_BYTES = 400 << 20
"""Of NCCL's buffers and channels with several ranks, outside torch's allocator."""

Key = tuple[Any, ...]


class Predictor:
    """Predicts a job's step under many layouts, each part of which is traced once."""

    def __init__(self, config: RunConfig, data: DataSection) -> None:
        """Raise ModelError where the job cannot be predicted; `data` is the job's with `auto` resolved."""
        if config.model.activation_offload:
            raise ModelError("model.activation_offload: the activations that stay on the device cannot be predicted.")
        self._config = config
        self._task, self._data = symbolic_task(config, data), data
        self._models: dict[Key, Any] = {}
        self._steps: dict[Key, SymbolicStep] = {}

    def predict(self, layout: Layout) -> Prediction:
        """Return the memory of one rank under this layout; raises ModelError."""
        sharding, precision = _sharding(layout), self._config.train.precision
        step = self._step(layout, sharding if precision != "fp32" or sharding.is_sharded else Sharding())
        is_zero = layout.strategy.startswith("zero")
        parts = zero_parts(self._config, layout, step) if is_zero else traced_parts(layout, step)
        parts |= self._outside_step(layout, num_trained=step.values["num_trained",])
        rounded = {name: round(size) for name, size in parts.items() if round(size)}
        flops = step.flops_per_token
        return Prediction(
            peak_bytes=sum(rounded.values()),
            parts=rounded,
            flops_per_token=flops["forward"] + flops["backward"],
            recomputed_flops_per_token=flops["recomputation"],
            num_parameters=round(step.values["num_parameters",]),
            num_trained=round(step.values["num_trained",]),
        )

    def _outside_step(self, layout: Layout, *, num_trained: float) -> dict[str, float]:
        """Return memory that is used outside the step: libraries on a GPU, checkpoints being written on a CPU."""
        if layout.device == "cuda":
            return {"libraries": CONTEXT_BYTES + (NCCL_BYTES if layout.num_ranks > 1 else 0)}
        optimizer = self._config.train.optimizer
        if not self._config.checkpoint.asynchronous:
            return {}
        trained = 4 * round(num_trained)
        state = optimizer_state_bytes(
            optimizer.name, optimizer.state_dtype, num_trained=round(num_trained), trained_bytes=trained
        )
        return {"checkpoint copies": (trained + state) / layout.num_ranks}

    def _step(self, layout: Layout, sharding: Sharding) -> SymbolicStep:
        key = (layout.method, layout.gradient_checkpointing, layout.microbatch_size, layout.device, sharding)
        if key not in self._steps:
            try:
                self._steps[key] = self._trace(layout, sharding)
            except FinetuneError:
                raise
            except Exception as error:  # whatever an architecture does that needs values
                raise ModelError(
                    f"the memory of this job cannot be predicted: {type(error).__name__}: {str(error).splitlines()[0]}"
                ) from error
        return self._steps[key]

    def _trace(self, layout: Layout, sharding: Sharding) -> SymbolicStep:
        section = with_method(self._config.model, layout.method, gradient_checkpointing=layout.gradient_checkpointing)
        key = (layout.method, layout.gradient_checkpointing)
        if key not in self._models:
            self._models[key] = empty_model(self._config, section, task=self._task)
        whole = self._models[key]
        is_merged = layout.device == "cuda" and is_token_task(self._config) and is_padding_free(self._data.batching)
        batch = largest_batch(
            self._config, self._task, data=self._data, num_samples=layout.microbatch_size, is_one_sample=is_merged
        )

        def trace(layers_of: KeptLayers) -> Values:
            model = make_trainable(with_layers(whole, layers_of), section, task=self._task, seed=self._config.run.seed)
            layers = [layer for name in layers_of for layer in _layers(model, name)]
            return trace_step(
                self._config,
                model,
                task=self._task,
                batch=batch,
                layers=layers,
                sharding=sharding,
                device=layout.device,
            )

        # a row of several samples was computed as one: its attention is that many times theirs
        num_merged = layout.microbatch_size if is_merged else 1
        return SymbolicStep(_extrapolated(whole, trace), tokens_of(batch), num_merged, unwrap_model(whole).config)


def _layers(model: Any, name: str) -> Sequence[nn.Module]:
    return list(unwrap_model(model).get_submodule(name).children())


def _extrapolated(model: Any, trace: Callable[[KeptLayers], Values]) -> Values:
    """Return the values of the whole model, from traces of a few layers of each kind."""
    stacks = find_stacks(model, with_sizes=True)
    if not can_be_extrapolated(stacks):
        return trace({stack.name: range(len(stack.kinds)) for stack in stacks})
    layers_of = fewest_layers(stacks)
    base: Mapping[Any, float] = trace(layers_of)
    found: defaultdict[Any, float] = defaultdict(float, base)
    for number, more in with_one_more(stacks, layers_of):
        values = trace(more)
        for name in {*base, *values}:
            found[name] += number * (values.get(name, 0.0) - base.get(name, 0.0))
    # Between its first and its last layer a backward pass holds less than at one of them, and a small copy has no such.
    return {name: value for name, value in found.items() if name[0] in ("held", "flops") or BETWEEN not in name}


def _sharding(layout: Layout) -> Sharding:
    """Return how parameters are held in the trace for this strategy."""
    if layout.strategy.startswith("zero"):
        return Sharding(is_half=True)
    if layout.strategy == "fsdp2":
        return Sharding(num_shards=layout.num_ranks)
    if layout.strategy == "hsdp":
        shards = min(layout.ranks_per_node, layout.num_ranks)
        return Sharding(num_shards=shards, num_copies=layout.num_ranks // shards)
    return Sharding()
