"""`finetune plan`: memory, duration and cost of a job, without loading any weights."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from finetune.commands.plan.assumptions import (
    FAILURE_GPU_HOURS,
    SPOT_HOURS_PER_MACHINE,
    TRAINING_SHARE,
    USABLE_SHARE,
)
from finetune.commands.plan.hardware import COMMON_HARDWARE, Hardware, own_hardware, parse_hardware
from finetune.commands.plan.outlook import Assumed, ScalePoint, make_outlook
from finetune.commands.plan.output import HardwarePlan, Plan, plan_json, print_plan
from finetune.commands.plan.planned_job import PlannedJob, count_data
from finetune.commands.plan.strategies import (
    Fit,
    PlannedMemory,
    Predict,
    StrategyPlan,
    choose_strategy_plan,
    plan_strategies,
    plan_strategy,
    rescale_to_ranks,
    timed,
    with_microbatch,
)
from finetune.commands.printing import print_json
from finetune.config.load import LoadedConfig, load_config
from finetune.errors import ModelError
from finetune.memory.predict import MemoryPredictor
from finetune.memory.state import STRATEGIES, Method, StrategyName, write_planned
from finetune.model.loading.architecture import load_model_config
from finetune.model.size import read_shapes
from finetune.report.history import read_history
from finetune.run.setup.model_checks import CheckedJob, Stage, changes_config, check_model
from finetune.run.setup.model_problems import resolve_padding_free
from finetune.runtime.files.read import read_json
from finetune.runtime.gpus import GpuModel, find_gpu, lowest, prices_of
from finetune.runtime.text.terminal import quiet_libraries

BUDGET_SECONDS = 30.0
"""CPU time of this process after which no further method or recomputation is tried."""

_METHODS: tuple[Method, ...] = ("full", "lora", "qlora")

WARM_UP_STEPS = 3
_MIN_STEPS = 5
MAX_GPUS = 256

_CUT_SHORT = f"Not all other methods were tried: the limit of {BUDGET_SECONDS:g} s of CPU time was reached."


@dataclass(frozen=True)
class PlanOptions:
    """The options of the command line in addition to the job: machines, tables and assumptions."""

    gpus: str | None = None
    num_nodes: int | None = None
    prices: Path | None = None
    gpu_table: Path | None = None
    network_gbit: float | None = None
    assumed: Assumed = field(default_factory=Assumed)


@dataclass(frozen=True)
class MeasuredRun:
    """The measured speed of an earlier run of this job on GPUs of one model."""

    gpu: GpuModel
    num_gpus: int
    strategy: str
    tokens_per_second: float
    num_steps: int


def plan(path: Path, overrides: Sequence[str], options: PlanOptions, *, as_json: bool) -> int:
    """Print the plan of the job; return 0, or 1 if it fits on none of the requested machines."""
    quiet_libraries(is_main=True)
    loaded = load_config(path, overrides)
    lines = check_model(CheckedJob(loaded, builds=changes_config(loaded.config.model)), [Stage.JOB, Stage.CONFIG])
    made = make_plan(loaded, options)
    if as_json:
        print_json(plan_json(made), indent=1, allow_nan=False)
    else:
        print_plan(made)
        print("".join(f"{line}\n" for line in lines), end="")
    return 0 if any(machine.best is not None for machine in made.machines) else 1


def make_plan(
    loaded: LoadedConfig,
    options: PlanOptions,
    *,
    predict: Predict | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Plan:
    """Return the plan, and store its memory peaks for the start of the run.

    Raises UserError for invalid machines and tables, ModelError for a model that cannot be read.
    """
    started, cpu_started = clock(), time.process_time()
    machines, sentences = _hardware(options)
    for hardware in machines:  # report errors in a table before the slow part
        prices_of(hardware.gpu.name, table=options.prices, gpu_table=options.gpu_table)
    job = PlannedJob(loaded.config, read_shapes(load_model_config(loaded.config.model)), count_data(loaded))
    is_predicted = predict is None
    predict = predict or MemoryPredictor(loaded.config, resolve_padding_free(loaded.config)).predict
    memory = PlannedMemory(predict, clock=clock)
    run = read_measured_run(Path(loaded.config.run.folder), gpu_table=options.gpu_table)
    machines, measured = _calibrated(machines, job, memory, run)
    planned = [
        _plan_hardware(
            job, hardware, memory, options, is_over=lambda: time.process_time() - cpu_started > BUDGET_SECONDS
        )
        for hardware in machines
    ]
    write_planned(loaded.config, memory.peaks())
    dtype = job.train.precision
    instead = _INSTEAD.get(dtype, "the speed of fp32 is assumed.")
    lacking = dict.fromkeys(hardware.gpu.name for hardware in machines if dtype not in hardware.gpu.flops)
    preempted = options.assumed.hours_between_preemptions
    spot = (
        f"the whole job every {preempted:g} hours (--time-between-preemptions)"
        if preempted is not None
        else f"each machine once in {SPOT_HOURS_PER_MACHINE:g} hours, which differs by cloud and hour "
        "(--time-between-preemptions HOURS)"
    )
    return Plan(
        job=job,
        job_file=loaded.path.name,
        machines=planned,
        assumptions=[
            *sentences,
            job.counts.sentence,
            *(f"{name} has no {dtype} units: {instead}" for name in lacking),
            *measured,
            *(_fused_gain(job, planned[0].hardware, planned[0].best) if is_predicted else ()),
            f"A step may take {USABLE_SHARE:.0%} of a GPU's memory: the allocator loses some to fragmentation.",
            f"Spot machines are preempted: {spot}. Others fail once in {FAILURE_GPU_HOURS:,.0f} GPU-hours.",
            f"A restart takes {options.assumed.restart_seconds / 60:g} minutes; checkpoints are written at "
            f"{options.assumed.disk_bandwidth / 1e9:g} GB/s. Evaluation, start-up and export are not counted.",
            "Prices come from finetune/runtime/gpu_prices.yaml, without storage, traffic and discounts: --prices FILE.",
            *([_CUT_SHORT] if any(0 < len(machine.variants) < 2 * len(_METHODS) for machine in planned) else []),
        ],
        seconds=clock() - started,
    )


def _fused_gain(job: PlannedJob, hardware: Hardware, best: StrategyPlan | None) -> list[str]:
    """Return a sentence with what liger's kernels would give; none if they are installed, or not wanted."""
    model = job.config.model
    is_wanted = model.kernels == "auto" and model.compile in ("auto", "off")
    if not is_wanted or find_spec("liger_kernel") is not None or best is None or best.time is None:
        return []
    fused = job.config.model_copy(update={"model": model.model_copy(update={"kernels": "liger"})})
    memory = PlannedMemory(MemoryPredictor(fused, resolve_padding_free(fused)).predict)
    with_kernels = plan_strategy(best.strategy, replace(job, config=fused), hardware, memory)
    if with_kernels.time is None or with_kernels.prediction is None or best.prediction is None:
        return []
    return [
        "liger-kernel is not installed here, so the plan is of a run without it. With it (pip install "
        f"'finetune-accelerate[kernels]') a step would take {with_kernels.time.seconds:.3g} s instead of "
        f"{best.time.seconds:.3g} s, and {with_kernels.prediction.peak_bytes / 2**30:.1f} GiB instead of "
        f"{best.prediction.peak_bytes / 2**30:.1f} GiB at microbatches of {with_kernels.layout.microbatch_size} and "
        f"{best.layout.microbatch_size}."
    ]


def _hardware(options: PlanOptions) -> tuple[list[Hardware], list[str]]:
    """Return the machines to plan for, and a sentence about them unless an option named them."""
    parse = partial(
        parse_hardware,
        num_nodes=options.num_nodes,
        gpu_table=options.gpu_table,
        network_gbit=options.network_gbit,
    )
    if options.gpus is not None:
        return [parse(text) for text in options.gpus.split(",")], []
    own = own_hardware(num_nodes=options.num_nodes, gpu_table=options.gpu_table)
    if own is not None:
        return [own], [f"Planned for the GPUs of this machine: {own}."]
    common = ", ".join(COMMON_HARDWARE)
    note = (
        f"This machine has no GPU: planned for {common}. Write --gpus 8xH100-80GB to choose others, or for all tables."
    )
    return [parse(text) for text in COMMON_HARDWARE], [note]


def _plan_hardware(
    job: PlannedJob, hardware: Hardware, memory: PlannedMemory, options: PlanOptions, *, is_over: Callable[[], bool]
) -> HardwarePlan:
    print(f"planning for {hardware} ...", file=sys.stderr, flush=True)
    prices = prices_of(hardware.gpu.name, table=options.prices, gpu_table=options.gpu_table)
    plans = plan_strategies(job, hardware, memory)
    best = choose_strategy_plan(plans)
    cheapest = lowest(prices, "on_demand")
    usd = cheapest.on_demand if cheapest is not None else None
    # The chosen strategy with each method, with and without recomputation, until the time budget is spent.
    strategy = best.strategy if best is not None else ("fsdp2" if hardware.num_gpus > 1 else "single")
    own, tensor_size = bool(job.checkpointing), best.layout.tensor_size if best is not None else 1
    pairs = [(method, recomputes) for recomputes in (own, not own) for method in _METHODS]
    variants: list[StrategyPlan] = []
    for method, recomputes in sorted(pairs, key=lambda variant: variant[0] != job.method):
        if options.gpus is None or is_over():
            break
        variants.append(
            plan_strategy(
                strategy, job, hardware, memory, method=method, checkpointing=recomputes, tensor_size=tensor_size
            )
        )
    return HardwarePlan(
        hardware=hardware,
        plans=plans,
        best=best,
        why=_why(best, plans),
        outlook=None if best is None else make_outlook(job, hardware, best, prices=prices, assumed=options.assumed),
        points=scale_points(job, hardware, plans, memory, usd_per_gpu_hour=usd),
        variants=variants,
    )


def _why(best: StrategyPlan | None, plans: Sequence[StrategyPlan]) -> str:
    """Return a sentence with the reason for choosing this strategy."""
    if best is None:
        return "No strategy fits on these GPUs."
    if best.strategy == "single":
        return "One GPU is enough: nothing is sharded and no communication is needed."
    if best.layout.tensor_size > 1:
        size = best.layout.tensor_size
        return (
            f"{best.strategy}: no other strategy can run this job. Groups of {size} GPUs share every layer and a "
            f"microbatch (`parallelism_config_tp_size: {size}`)."
        )
    simpler = [other for other in plans if STRATEGIES.index(other.strategy) < STRATEGIES.index(best.strategy)]
    too_large = [other.strategy for other in simpler if other.fit is not None and other.reason is not None]
    fitting = [other for other in plans if other.fits and other.time is not None and other is not best]
    others = [other.strategy for other in fitting if other.layout.num_ranks == best.layout.num_ranks]
    parts = [f"{', '.join(too_large)} would run out of memory"] if too_large else []
    if others:
        names = ", ".join(sorted([best.strategy, *others]))
        parts.append(f"it is the fastest of {names}, or the simplest of those nearly as fast")
    return f"{best.strategy}: " + ("; ".join(parts) or "it is the only one that fits") + "."


def _calibrated(
    machines: list[Hardware], job: PlannedJob, memory: PlannedMemory, run: MeasuredRun | None
) -> tuple[list[Hardware], list[str]]:
    """Return the machines with the speed of an earlier run of the job on such GPUs, and a sentence about it."""
    assumed = (
        machines,
        [
            f"Efficiency is assumed: matrix products reach {TRAINING_SHARE:.0%} of the speed of the GPU's largest ones "
            "(`matmul_share` in the table). Published runs differ from this by up to 25%: docs/how-to/planning.md."
        ],
    )
    strategy = next((name for name in STRATEGIES if run is not None and name == run.strategy), None)
    size, batch = job.train.microbatch_size, job.train.global_batch_size
    if run is None or strategy is None or not isinstance(size, int) or batch // run.num_gpus % size:
        return assumed
    hardware = Hardware(run.gpu, run.num_gpus).with_gpus(run.num_gpus)
    try:
        layout = with_microbatch(plan_strategy(strategy, job, hardware, memory).layout, size)
        prediction = memory.at(layout)
    except ModelError:
        return assumed
    modeled = timed(job, hardware, layout, Fit(size, prediction, prediction))
    if modeled.time is None:
        return assumed
    factor = batch * job.counts.tokens_per_position / modeled.time.seconds / run.tokens_per_second
    line = (
        f"Efficiency is measured: {run.num_steps} steps of this job's run on {run.num_gpus}x {run.gpu.name} took "
        f"{factor:.2f} times as long as predicted; times on this GPU model are multiplied by this factor."
    )
    return [
        replace(hardware, slowdown=factor) if hardware.gpu.name == run.gpu.name else hardware for hardware in machines
    ], [line]


_INSTEAD = {
    "bf16": "the speed of fp32 is assumed. Write train.precision: fp16.",
    "fp8": "a run is refused there. Write train.precision: bf16.",
}


def read_measured_run(folder: Path, *, gpu_table: Path | None = None) -> MeasuredRun | None:
    """Return the speed of the run in the folder; None without a run, for an unknown GPU, or after few steps."""
    try:
        history = read_history(folder)
        environment = read_json(folder / "environment.json")
        device = environment["devices"][0]
        world = int(environment["launcher"].get("WORLD_SIZE", "1"))
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None
    gpu = find_gpu(str(device.get("name", "")), table=gpu_table) if device.get("type") == "cuda" else None
    rates = history.steps.compute_rates(num_warm_up=WARM_UP_STEPS)
    if gpu is None or not history.starts or len(rates) < _MIN_STEPS:
        return None
    name = str(history.starts[-1].get("strategy", "")).partition(" ")[0]  # `fsdp2 on 8 processes splits ...`
    return MeasuredRun(gpu, world, name, median(rates.tolist()), len(rates))


def scale_points(
    job: PlannedJob,
    hardware: Hardware,
    plans: Sequence[StrategyPlan],
    memory: PlannedMemory,
    *,
    usd_per_gpu_hour: float | None,
) -> list[ScalePoint]:
    """Return a point for each power of two that divides the global batch and on which the job fits.

    FSDP's step is not traced again for each number of ranks: the sharded part of its memory is scaled, at a microbatch
    that fits. For other strategies one trace serves any number of ranks.
    """
    points = []
    planned = {plan.strategy: plan for plan in plans if plan.fit is not None}
    for num_gpus in (1 << power for power in range(MAX_GPUS.bit_length())):
        if job.train.global_batch_size % num_gpus:
            continue
        machines = hardware.with_gpus(num_gpus)
        for name in STRATEGIES:  # on the planned number of GPUs, not all of them could be used
            if name not in planned and (plan := plan_strategy(name, job, machines, memory)).fit is not None:
                planned[name] = plan
        scaled = [_with_gpus(job, machines, plan, memory) for plan in planned.values()]
        best = choose_strategy_plan([plan for plan in scaled if plan is not None])
        if best is not None and best.time is not None:
            rate = job.train.global_batch_size * job.counts.tokens_per_position / best.time.seconds
            points.append(ScalePoint(num_gpus, rate, usd_per_gpu_hour, best.strategy, best.layout.microbatch_size))
    return points


def _with_gpus(job: PlannedJob, hardware: Hardware, plan: StrategyPlan, memory: PlannedMemory) -> StrategyPlan | None:
    """Return the strategy on these GPUs; None if it does not fit or does not support their number."""
    num_gpus, fit = hardware.num_gpus, plan.fit
    strategy: StrategyName = "hsdp" if plan.strategy == "fsdp2" and hardware.num_nodes > 1 else plan.strategy
    if fit is None or (strategy == "single") != (num_gpus == 1) or plan.strategy == "hsdp":
        return None
    if plan.layout.tensor_size > 1:
        return None
    share = job.train.global_batch_size // num_gpus
    layout = replace(plan.layout, strategy=strategy, num_ranks=num_gpus, ranks_per_node=hardware.gpus_per_node)
    sizes = [size for size in {fit.microbatch_size, 1} if size and share % size == 0]
    for size in sorted(sizes, reverse=True):
        prediction = fit.largest if size == fit.microbatch_size and fit.largest is not None else fit.smallest
        if strategy in ("fsdp2", "hsdp"):
            shards = min(num_gpus, hardware.gpus_per_node) if strategy == "hsdp" else num_gpus
            prediction = rescale_to_ranks(prediction, old_ranks=plan.layout.num_ranks, new_ranks=shards)
        else:
            prediction = memory.at(replace(layout, microbatch_size=size))
        if prediction.peak_bytes <= hardware.usable_bytes:
            return timed(job, hardware, with_microbatch(layout, size), Fit(size, fit.smallest, prediction))
    return None
