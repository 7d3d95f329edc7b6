"""Traces one training step with fake tensors: its memory in every phase, and its FLOPs.

Then the memory of one rank at the peak, by part: of whole parameters, FSDP2's shards, or ZeRO's engine.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin, convert_outputs_to_fp32
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from finetune.config.run_config import RunConfig
from finetune.data.batch import Batch
from finetune.memory.fake_model import QuantizedLinear, materialize_fake
from finetune.memory.state import TrainingLayout
from finetune.memory.tracer import ACTIVATIONS, GATHERED, GRADIENTS, OPTIMIZER, WEIGHTS, Tracer
from finetune.model.size import AVERAGE_BYTES, Shapes, optimizer_state_bytes
from finetune.model.upstream import expose_hidden_size, head_as_one_unit
from finetune.registry.model_choices import ARITHMETIC
from finetune.registry.optimizers import OPTIMIZERS
from finetune.runtime.processes import restored_environment
from finetune.strategy.gradient_sync import keep_experts_in_graph
from finetune.strategy.upstream import zero_bucket_sizes
from finetune.task.lm_loss.chunked_loss import assume_device
from finetune.task.lm_loss.head import find_lm_head
from finetune.task.model_inputs import unwrap_model
from finetune.task.protocol import Task
from finetune.train.optim.optimizers import OptimizerInputs, begin_step, build_optimizer
from finetune.train.optim.parameter_groups import list_parameters

FORWARD, LOSS, UPDATE, RECOMPUTATION = "forward", "loss", "update", "recomputation"
HEAD, BETWEEN = "backward of the head", "backward"
FIRST, LAST = "backward of the last layer", "backward of the first layer"  # in the order of the backward pass

Values = Mapping[tuple[str, ...], float]
"""Measurements of a step by name; all grow linearly with the number of layers."""


@dataclass(frozen=True)
class Sharding:
    """The storage of parameters: unsharded, in training precision (ZeRO), or sharded by FSDP2."""

    is_half: bool = False
    num_shards: int = 1
    num_copies: int = 1

    @property
    def is_sharded(self) -> bool:
        """Return whether FSDP2 shards the parameters."""
        return self.num_shards * self.num_copies > 1


@contextmanager
def fake_mesh(sharding: Sharding) -> Iterator[Any]:
    """Yield a device mesh with a fake process group, in which this process is rank 0; nothing is communicated."""
    if not sharding.is_sharded:
        yield None
        return
    world = sharding.num_shards * sharding.num_copies
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        if sharding.num_copies == 1:
            yield init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
        else:
            sizes = (sharding.num_copies, sharding.num_shards)
            yield init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    finally:
        torch.distributed.destroy_process_group()


def trace_step(
    config: RunConfig, model: Any, *, task: Task, batch: Batch, layers: list[nn.Module], sharding: Sharding, device: str
) -> Values:
    """Return the measurements of a step of this meta-device model, with its optimizer state already allocated.

    `layers` are the model's layers; hooks on them mark the phases.
    """
    tracer = Tracer()
    half = None if config.train.precision == "fp32" else torch.bfloat16  # fp16 uses the same memory
    with fake_mesh(sharding) as mesh, FakeTensorMode(allow_non_fake_inputs=True), tracer, assume_device(device):
        parameters, modules = list(model.parameters()), list(model.modules())
        sizes = [parameter.numel() for parameter in parameters]
        inner: Any = unwrap_model(model)
        head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
        packed = [module for module in modules if isinstance(module, QuantizedLinear)]
        bases = [getattr(module, "base_layer", None) for module in modules]  # as peft's layers call it
        adapted = [base for base in bases if isinstance(base, nn.Linear)]
        values: dict[tuple[str, ...], float] = {
            ("num_parameters",): sum(sizes) + sum(module.num_values - module.weight.numel() for module in packed),
            ("num_trained",): sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            ("num_adapted_features",): sum(base.in_features + base.out_features for base in adapted),
            ("num_frozen_products",): sum(
                module.weight.numel()
                for module in modules
                if type(module) is nn.Linear and not module.weight.requires_grad and module is not head
            ),
            ("largest",): max(sizes),
        }
        keep_experts_in_graph(model)
        materialize_fake(model, dtype=half if sharding.is_half else None)
        with unset_fake_temporarily():
            find_lm_head(model)  # runs the model's forward on real values
        if sharding.is_sharded:
            model = _shard(model, mesh, half)
        elif half is not None and not sharding.is_half:
            model.forward = convert_outputs_to_fp32(torch.autocast("cpu", half)(model.forward))  # as Accelerate does
        optimizer = _optimizer(config, model, tracer)
        _watch_phases(tracer, layers)
        _take_step(config, model, optimizer, task=task, batch=batch, tracer=tracer)
    values |= {("held", category): size for category, size in tracer.held.items()}
    for phase, peak in tracer.peaks.items():
        values["peak", phase] = peak
        values["transient", phase] = tracer.transient_peaks[phase]
        for category, size in tracer.held_at_peak[phase].items():
            values["part", phase, category] = size
    for (phase, is_attention), flops in tracer.flops.items():
        values["flops", phase, "attention" if is_attention else "products"] = flops
    return values


def _shard(model: Any, mesh: Any, half: torch.dtype | None) -> Any:
    """Return the model as Accelerate prepares it for FSDP2."""
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32) if half else MixedPrecisionPolicy()
    with restored_environment():  # into which the plugin writes, for whatever is started later
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            reshard_after_forward=True,
            cpu_ram_efficient_loading=False,
            mixed_precision_policy=policy,
            state_dict_type="SHARDED_STATE_DICT",
        )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh={("shard",): mesh},
        parallelism_config=SimpleNamespace(fsdp_dim_names=("shard",)),
        mixed_precision="no" if half is None else "bf16",
        is_main_process=False,
        device=torch.device("cpu"),
    )
    with expose_hidden_size(model.config), head_as_one_unit(unwrap_model(model)):
        return fsdp2_prepare_model(accelerator, model)


def _optimizer(config: RunConfig, model: Any, tracer: Tracer) -> torch.optim.Optimizer:
    train = config.train
    needs_values = OPTIMIZERS[train.optimizer.name].moment_bytes is not None
    optimizer = build_optimizer(
        list_parameters(model),
        train.optimizer,
        learning_rate=train.learning_rate,
        average=train.average,
        build=_QuantizedMoments if needs_values else None,
    )
    with tracer.counting_as(OPTIMIZER):
        begin_step(optimizer, step=0, learning_rate=train.learning_rate)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.empty_like(parameter)
        _update(config, model, optimizer)  # DTensor plans every operator once, with unsharded tensors
        optimizer.zero_grad()
    return optimizer


class _QuantizedMoments(torch.optim.Optimizer):
    """Allocates the moments of an optimizer that does not run without values, by the registry, and updates nothing.

    Moments that may move to the host (paged) count as if they stayed: a step that needs their space waits for them.
    """

    def __init__(self, inputs: OptimizerInputs) -> None:
        super().__init__(inputs.groups, {"lr": inputs.learning_rate})
        self._entry = OPTIMIZERS[inputs.section.name]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Allocate the moments of each parameter that has a gradient, unless it has them."""
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if parameter.grad is not None and not self.state[parameter]:
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                size = round(self._entry.num_moments * (self._entry.moment_bytes or 0) * local.numel())
                self.state[parameter]["moments"] = torch.empty(size, dtype=torch.uint8, device=local.device)


def _update(config: RunConfig, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Clip the gradients and step, as `finetune.train.update` does."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in trained if weight.grad is not None])
    if config.train.max_gradient_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(trained, config.train.max_gradient_norm, norm)
    optimizer.step()


def _take_step(
    config: RunConfig, model: Any, optimizer: torch.optim.Optimizer, *, task: Task, batch: Batch, tracer: Tracer
) -> None:
    """Take a step of one microbatch, as `finetune.train.step` does."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(lambda weight: tracer.reclassify(weight.grad, GRADIENTS))
    begin_step(optimizer, step=1, learning_rate=config.train.learning_rate)
    tracer.category = ACTIVATIONS
    tracer.begin(FORWARD)
    (batch,) = task.prepare_step(model, [batch])
    loss: Tensor = task.loss_sums(model, batch)["loss_sum"]
    tracer.begin(HEAD)
    (loss * (1 / max(1, batch.num_targets))).backward()  # type: ignore[no-untyped-call]  # torch has no types for it
    del loss
    for parameter in trained:
        if parameter.grad is not None:
            tracer.reclassify(parameter.grad, GRADIENTS)
    tracer.begin(UPDATE)
    _update(config, model, optimizer)


def _watch_phases(tracer: Tracer, layers: list[nn.Module]) -> None:
    """Set the phase of the tracer with hooks on the layers."""
    num_done = 0  # layers that the forward pass has completed

    def begin_part(*_: Any) -> None:
        if tracer.phase not in (FORWARD, LOSS):
            tracer.flop_phase = RECOMPUTATION

    def end_part(*_: Any) -> None:
        tracer.flop_phase = None

    def enter(*_: Any) -> None:
        if tracer.phase in (FORWARD, LOSS):
            tracer.begin(FORWARD)

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        nonlocal num_done
        if tracer.phase != FORWARD:
            return
        states = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad), None)
        if states is not None:
            states.register_hook(partial(enter_backward, num_done))  # type: ignore[no-untyped-call]  # as above
        num_done += 1
        tracer.begin(LOSS)

    def enter_backward(number: int, _: Tensor) -> None:
        tracer.begin(LAST if number == 0 else FIRST if number == num_done - 1 else BETWEEN)

    for layer in layers:
        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)
        for part in layer.children():  # recomputation calls the parts of a layer
            part.register_forward_pre_hook(begin_part)
            part.register_forward_hook(end_part, always_call=True)


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


def traced_parts(layout: TrainingLayout, step: SymbolicStep) -> dict[str, float]:
    """Return the memory of a rank at the peak of the step, by name."""
    if layout.strategy == "ddp":  # whose buckets allocate all gradients at construction
        held = {category: step.bytes_of(category) for category in (WEIGHTS, GRADIENTS, OPTIMIZER)}
        return {**held, ACTIVATIONS: step.transient(*step.phases)}
    peak = max(step.phases, key=lambda phase: step.values["peak", phase])
    categories = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, GATHERED)
    return {category: step.values.get(("part", peak, category), 0.0) for category in categories}


def tensor_parallel_parts(
    parts: Mapping[str, float], layout: TrainingLayout, shapes: Shapes | None
) -> dict[str, float]:
    """Return the parts of a rank that shares every layer with others, from the parts of a rank that does not.

    Weights and their state are divided (norms, too, which are few). Of a layer's activations, only heads and the
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


def zero_parts(config: RunConfig, layout: TrainingLayout, step: SymbolicStep) -> dict[str, float]:
    """Return the memory of a rank at the peak of a step under ZeRO, by name.

    The trace has the weights in the precision of training, to which DeepSpeed converts them.
    """
    stage, num_ranks = int(layout.strategy[4]), layout.num_ranks
    item = ARITHMETIC[config.train.precision].item_bytes  # of an element in weights, gradients and buffers
    offloads = layout.strategy.endswith("offload") and layout.device == "cuda"
    trained, weights = step.values["num_trained",], step.bytes_of(WEIGHTS)
    share = trained / num_ranks
    width = getattr(step.config.get_text_config(), "hidden_size", 0) or 0
    sizes = zero_bucket_sizes(num_trained=round(trained), width=width, stage=stage)
    bucket = item * sizes["reduce_bucket_size"]  # of gradients that are reduced together
    state = optimizer_state_bytes(
        config.train.optimizer.name,
        config.train.optimizer.state_dtype,
        num_trained=round(trained),
        trained_bytes=round(4 * trained),
    )
    averages = AVERAGE_BYTES * trained if config.train.average else 0
    optimizer = 0.0 if offloads else 4 * share + (state + averages) / num_ranks  # with float32 weights
    # Stage 3 shards the parameters, too: layers are gathered while they compute, and some longer.
    if stage == 3:
        prefetch = item * sizes.get("stage3_prefetch_bucket_size", _DEFAULT_PREFETCH)
        gathered = min(weights, KEPT_NUMEL * item + step.values["largest",] * item) + min(weights, prefetch)
        computing = step.transient(*FORWARD_PASS, *BACKWARD)
        update = 0.0 if offloads else 4 * min(share, 1e9) + step.transient(UPDATE)
        parts = {
            WEIGHTS: 0.0 if offloads else weights / num_ranks,
            GRADIENTS: 0.0 if offloads else item * share,
            OPTIMIZER: optimizer,
        }
        if update > computing + gathered:
            return {**parts, ACTIVATIONS: update, GATHERED: bucket}
        return {**parts, ACTIVATIONS: computing, GATHERED: gathered + bucket}
    buffers = 2 * bucket  # one is filled while the other is reduced
    forward = step.transient(*FORWARD_PASS)
    backward = buffers + max(step.transient(*BACKWARD), step.transient(LAST) + item * share)
    update = (0 if offloads else 4 + item) * share + step.transient(UPDATE)
    parts = {WEIGHTS: weights, OPTIMIZER: optimizer}
    if backward >= max(forward, update):
        return {**parts, ACTIVATIONS: backward - buffers, GATHERED: buffers}
    return {**parts, ACTIVATIONS: forward} if forward > update else {**parts, GRADIENTS: update}
