"""The strategies on one machine: memory, largest microbatch and time of a step, and the choice among them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import get_args

from finetune.commands.plan.assumptions import ADAPTED_TRAFFIC_PER_FEATURE, TRAFFIC_PER_INTERMEDIATE
from finetune.commands.plan.hardware import Hardware
from finetune.commands.plan.planned_job import PlannedJob
from finetune.commands.plan.step_time import StepTime, Work, step_time
from finetune.config.run_config import RunConfig
from finetune.errors import ModelError, StrategyError
from finetune.memory.fake_model import runs_fused_layers
from finetune.memory.state import STRATEGIES, Method, Prediction, StrategyName, TensorParallelName, TrainingLayout
from finetune.model.kernels.compilation import (
    FUSED_TRAFFIC_PER_HIDDEN,
    TRAFFIC_PER_HIDDEN,
    CompilationEstimate,
    estimate_compilation,
)
from finetune.registry.accelerate_files import SHIPPED
from finetune.run.setup.strategy import (
    job_settings,
    require_splittable_job,
    require_splittable_model,
    require_supported_by_strategy,
)
from finetune.strategy.environment import LaunchEnvironment
from finetune.strategy.reconcile import find_conflicts

Predict = Callable[[TrainingLayout], Prediction]


def largest_fit(predict: Predict, layout: TrainingLayout, *, usable_bytes: int, sizes: Sequence[int]) -> int | None:
    """Return the largest of the microbatch sizes (ascending) that fits, confirmed by a prediction at it.

    None if not even the smallest fits. Above some size, memory grows linearly, so interpolation between a size that
    fits and one that does not finds the next size to try. Raises ModelError if it cannot be predicted.
    """

    @cache
    def peak(index: int) -> int:
        return predict(replace(layout, microbatch_size=sizes[index])).peak_bytes

    fits, fails = 0, len(sizes) - 1
    if peak(fits) > usable_bytes:
        return None
    if peak(fails) <= usable_bytes:
        return sizes[fails]
    while fails - fits > 1:
        share = (usable_bytes - peak(fits)) / (peak(fails) - peak(fits))
        estimate = sizes[fits] + share * (sizes[fails] - sizes[fits])
        between = range(fits + 1, fails)
        tried = max((index for index in between if sizes[index] <= estimate), default=between[0])
        if peak(tried) <= usable_bytes:
            fits = tried
        else:
            fails = tried
    return sizes[fits]


NEARLY_FASTEST = 1.07
"""A simpler strategy is preferred if its step is at most this much slower: the cost model is no more accurate."""

MAX_MICROBATCH_TOKENS = 1 << 21
"""No larger microbatch is planned, unless it is one sample: it is no faster, and takes minutes to trace."""

_SIMPLEST_FIRST: tuple[StrategyName, ...] = (*STRATEGIES, *get_args(TensorParallelName))

MULTI_NODE_FILES: Mapping[str, str] = {
    name: f"accelerate_configs/multi_node_{name}.yaml" for name in ("ddp", "fsdp2", "hsdp", "zero3")
}


@dataclass(frozen=True)
class StrategyPlan:
    """The plan of one strategy for the job on a machine.

    `reason` says why it cannot be used, or does not fit with any microbatch. `prediction` is the memory with the
    largest microbatch that fits, or with one sample if not even that does; None if nothing was predicted.
    """

    strategy: StrategyName
    layout: TrainingLayout
    prediction: Prediction | None = None
    num_microbatches: int = 0
    time: StepTime | None = None
    reason: str | None = None
    compilation: CompilationEstimate | None = None  # of `model.compile: auto`

    @property
    def fits(self) -> bool:
        """Return whether the job can run with this strategy."""
        return self.time is not None and self.reason is None


def accelerate_file(strategy: str, hardware: Hardware) -> str:
    """Return the accelerate config to launch with: that of the current folder, or else that of the package."""
    is_multi_node = hardware.num_nodes > 1 and strategy in MULTI_NODE_FILES
    path = MULTI_NODE_FILES[strategy] if is_multi_node else f"accelerate_configs/{strategy}.yaml"
    return path if Path(path).is_file() else str(SHIPPED / Path(path).name)


def plan_strategies(job: PlannedJob, hardware: Hardware, predict: Predict) -> list[StrategyPlan]:
    """Return a plan for every strategy, in their usual order.

    Where none can run the job on all GPUs (fewer samples than GPUs, too little memory), also for tensor parallelism.
    """
    plans = [plan_strategy(name, job, hardware, predict) for name in STRATEGIES]
    if choose_strategy_plan(plans) is None and hardware.num_gpus > 1:
        per_node = hardware.gpus_per_node
        for name in get_args(TensorParallelName):  # with the groups of ranks of one machine that make it fastest
            sizes = [per_node] if name == "tensor_parallel" else [size for size in (2, 4, 8) if per_node % size == 0]
            grouped = [plan_strategy(name, job, hardware, predict, tensor_size=size) for size in sizes or [1]]
            plans.append(
                min(grouped, key=lambda plan: (not plan.fits, 0.0 if plan.time is None else plan.time.seconds))
            )
    return plans


def choose_strategy_plan(plans: Sequence[StrategyPlan]) -> StrategyPlan | None:
    """Return the simplest of the fastest strategies that fit; None if none fits."""
    has_several = any(plan.layout.num_ranks > 1 for plan in plans)  # then one of several GPUs is not a plan
    fitting = [plan for plan in plans if plan.fits and not (plan.strategy == "single" and has_several)]
    if not fitting:
        return None
    fastest = min(_seconds(plan) for plan in fitting)
    near = [plan for plan in fitting if _seconds(plan) <= fastest * NEARLY_FASTEST]
    return min(near, key=lambda plan: _SIMPLEST_FIRST.index(plan.strategy))


def plan_strategy(
    strategy: StrategyName,
    job: PlannedJob,
    hardware: Hardware,
    predict: Predict,
    *,
    method: Method | None = None,
    checkpointing: bool | None = None,
    tensor_size: int = 1,
) -> StrategyPlan:
    """Return the plan of one strategy; `method` and `checkpointing` replace the job's own."""
    ranks = 1 if strategy == "single" else hardware.num_gpus
    layout = TrainingLayout(
        strategy=strategy,
        num_ranks=ranks,
        method=method or job.method,
        gradient_checkpointing=job.checkpointing if checkpointing is None else checkpointing,
        microbatch_size=1,
        ranks_per_node=min(ranks, hardware.gpus_per_node),
        tensor_size=tensor_size,
    )
    reason = _why_not(job.config, layout)
    share = job.train.global_batch_size // layout.num_groups
    if reason is None and share * layout.num_groups != job.train.global_batch_size:
        sharing = f"{layout.num_groups} groups of {tensor_size} GPUs" if tensor_size > 1 else f"{ranks} GPUs"
        reason = f"train.global_batch_size {job.train.global_batch_size} cannot be shared by {sharing}"
    if reason is not None:
        return StrategyPlan(strategy, layout, reason=reason)
    try:
        max_size = max(1, MAX_MICROBATCH_TOKENS // job.max_position_tokens)
        sizes = [size for size in range(1, min(share, max_size) + 1) if share % size == 0]
        size = largest_fit(predict, layout, usable_bytes=hardware.usable_bytes, sizes=sizes)
    except ModelError as error:
        return StrategyPlan(strategy, layout, reason=str(error).splitlines()[0])
    if size is None:
        return StrategyPlan(strategy, layout, predict(layout), reason="out of memory with one sample")
    # The time of a step at that microbatch.
    layout = replace(layout, microbatch_size=size)
    prediction, num_microbatches = predict(layout), share // size
    compilation = _estimated_compilation(job, hardware, layout)
    work = step_work(job, layout, prediction, num_microbatches=num_microbatches, compilation=compilation)
    fp8_share = job.fp8_share(prediction.flops_per_token, strategy=strategy)
    device = hardware.device(job.peak_dtype(has_tf32="tf32" in hardware.gpu.flops), fp8_share=fp8_share)
    cluster = hardware.with_gpus(ranks).cluster if ranks != hardware.num_gpus else hardware.cluster
    time = step_time(strategy, work, device=device, cluster=cluster)
    return StrategyPlan(strategy, layout, prediction, num_microbatches, time, compilation=compilation)


def _why_not(config: RunConfig, layout: TrainingLayout) -> str | None:
    """Return why the strategy cannot be used for this job or machine; None if it can."""
    name = layout.strategy
    if layout.num_ranks == 1 and name not in ("single", "zero2_offload", "zero3_offload"):
        return "for several GPUs"
    if name in get_args(TensorParallelName):
        is_alone = layout.strategy == "tensor_parallel"
        if is_alone and layout.num_ranks > layout.ranks_per_node:
            return "for the GPUs of one machine"
        if not is_alone and (layout.tensor_size == 1 or layout.num_groups == 1):
            return "for several groups of GPUs"
        if config.run.strategy not in (None, "tp" if is_alone else "fsdp2"):
            return f"the job sets run.strategy: {config.run.strategy}"
        try:
            require_splittable_job(config)
            require_splittable_model(config, size=layout.tensor_size)
        except StrategyError as error:
            return str(error).splitlines()[-1].strip()
        return None
    if name == "hsdp" and layout.num_ranks <= layout.ranks_per_node:
        return "for several machines: on one it is fsdp2"
    if config.run.strategy not in (None, name.removesuffix("_offload")):
        return f"the job sets run.strategy: {config.run.strategy}"
    try:
        require_supported_by_strategy(config, name.removesuffix("_offload"))
    except StrategyError as error:
        return str(error).splitlines()[0]
    conflicts = find_conflicts(_environment(layout), job_settings(config))
    return conflicts[0] if conflicts else None


def _environment(layout: TrainingLayout) -> LaunchEnvironment:
    name, offloads = layout.strategy.removesuffix("_offload"), layout.strategy.endswith("_offload")
    return LaunchEnvironment(
        world=layout.num_ranks,
        has_device=layout.device == "cuda",
        has_process_group=layout.num_ranks > 1,
        is_fsdp=name in ("fsdp2", "hsdp"),
        zero_stage=int(name[-1]) if name.startswith("zero") else None,
        deepspeed={"zero_optimization": {"offload_optimizer": {"device": "cpu"}}} if offloads else {},
    )


def _seconds(plan: StrategyPlan) -> float:
    assert plan.time is not None
    return plan.time.seconds


_STORED_BYTES = {4: 0.5, 8: 1.0}
_UNKNOWN_LAYERS = 24


def _estimated_compilation(job: PlannedJob, hardware: Hardware, layout: TrainingLayout) -> CompilationEstimate | None:
    """Return the estimate by which `model.compile: auto` decides; None if nothing is known or to be decided."""
    model, num_steps = job.config.model, job.counts.num_steps
    if model.compile != "auto" or job.shapes is None or num_steps is None:
        return None
    if layout.strategy.startswith("zero3") or runs_fused_layers(model, device="cuda"):
        return None
    return estimate_compilation(
        job.shapes,
        hardware.gpu,
        num_tokens=num_steps * job.train.global_batch_size * job.counts.tokens_per_position / layout.num_ranks,
        item_bytes=job.compute_bytes,
        recomputes=bool(layout.gradient_checkpointing),
    )


def step_work(
    job: PlannedJob,
    layout: TrainingLayout,
    prediction: Prediction,
    *,
    num_microbatches: int,
    compilation: CompilationEstimate | None = None,
) -> Work:
    """Return the computation and communication of one rank in a step of the job under the layout."""
    mode, breaks_graphs = job.config.model.compile, layout.strategy.startswith("zero3")
    is_compiled = compilation.pays if compilation is not None else mode in ("regional", "full") and not breaks_graphs
    is_fused = is_compiled or runs_fused_layers(job.config.model, device="cuda")
    parameters, trained = prediction.num_parameters, prediction.num_trained
    recomputes = prediction.recomputed_flops_per_token > 0
    is_copied = layout.strategy in ("single", "ddp") and job.is_autocast and layout.method == "full"
    passes = 3 if recomputes else 2
    # FSDP2 and ZeRO reduce gradients in float32, DDP in the type of the weights.
    is_half = layout.strategy == "ddp" and layout.method == "full" and job.config.model.dtype != "float32"
    traffic = 0.0
    if job.shapes is not None:
        hidden = FUSED_TRAFFIC_PER_HIDDEN if is_fused else TRAFFIC_PER_HIDDEN
        per_layer = hidden * job.shapes.hidden + TRAFFIC_PER_INTERMEDIATE * job.shapes.intermediate
        adapted = ADAPTED_TRAFFIC_PER_FEATURE * prediction.num_adapted_features
        traffic = (job.shapes.layers * per_layer + adapted) * (job.compute_bytes / 2)
    gathered = float(job.compute_bytes)
    if layout.method == "qlora":  # quantized weights are gathered and read as such
        quantization = job.config.model.quantization
        gathered = _STORED_BYTES[quantization.bits if quantization is not None else 4]
    work = Work(
        num_tokens=layout.microbatch_size * job.counts.tokens_per_position,
        num_microbatches=num_microbatches,
        flops_per_token=prediction.flops_per_token,
        recomputed_flops_per_token=prediction.recomputed_flops_per_token,
        attention_flops_per_token=prediction.attention_flops_per_token,
        traffic_per_token=traffic,
        num_layers=job.shapes.layers if job.shapes is not None else _UNKNOWN_LAYERS,
        num_parameters=parameters,
        num_trained=trained,
        weight_bytes=parameters * gathered,
        gradient_bytes=trained * (2.0 if is_half else 4.0),
        trained_weight_bytes=trained * job.compute_bytes,
        num_casts=(passes - 1 if is_copied else 0),
        dequantized_bytes=passes * 2.5 * parameters if layout.method == "qlora" else 0.0,
    )
    if layout.tensor_size == 1:
        return work
    assert job.shapes is not None, "a model of these types has shapes"
    shapes, item_bytes = job.shapes, job.compute_bytes
    return work.shared(
        layout.tensor_size, hidden=shapes.hidden, intermediate=shapes.intermediate, item_bytes=item_bytes
    )
