"""`finetune plan`: memory, duration and cost of a job, without loading any weights."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from finetune.commands.plan.assumptions import (
    DISK_BANDWIDTH,
    FAILURE_GPU_HOURS,
    RESTART_SECONDS,
    TRAINING_SHARE,
    USABLE_SHARE,
)
from finetune.commands.plan.hardware import COMMON_HARDWARE, Hardware, own_hardware, parse_hardware
from finetune.commands.plan.outlook import make_outlook
from finetune.commands.plan.output import HardwarePlan, Plan, plan_json, print_plan
from finetune.commands.plan.planned_job import PlannedJob, count_data
from finetune.commands.plan.strategies import (
    Predict,
    StrategyPlan,
    choose_strategy_plan,
    plan_strategies,
    plan_strategy,
)
from finetune.commands.printing import print_json
from finetune.config.load import LoadedConfig, load_config
from finetune.memory.predict import MemoryPredictor
from finetune.memory.state import STRATEGIES, Method
from finetune.model.loading.architecture import load_model_config
from finetune.model.size import read_shapes
from finetune.run.setup.model_checks import CheckedJob, Stage, changes_config, check_model
from finetune.run.setup.model_problems import resolve_padding_free
from finetune.runtime.gpus import prices_of
from finetune.runtime.text.terminal import quiet_libraries


@dataclass(frozen=True)
class PlanOptions:
    """The options of the command line in addition to the job: machines, tables and assumptions."""

    gpus: str | None = None
    num_nodes: int | None = None
    prices: Path | None = None
    gpu_table: Path | None = None
    network_gbit: float | None = None
    hours_between_preemptions: float | None = None  # of the whole job, on spot machines


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


def make_plan(loaded: LoadedConfig, options: PlanOptions, *, predict: Predict | None = None) -> Plan:
    """Return the plan; raises UserError for invalid machines and tables, ModelError for a model that cannot be read."""
    started = time.monotonic()
    machines, sentences = choose_machines(options)
    for hardware in machines:  # report errors in a table before the slow part
        prices_of(hardware.gpu.name, table=options.prices, gpu_table=options.gpu_table)
    job = PlannedJob(loaded.config, read_shapes(load_model_config(loaded.config.model)), count_data(loaded))
    predict = predict or MemoryPredictor(loaded.config, resolve_padding_free(loaded.config)).predict
    planned = [
        _plan_hardware(job, hardware, predict, options, tries_methods=len(machines) == 1) for hardware in machines
    ]
    dtype = job.train.precision
    lacking = dict.fromkeys(hardware.gpu.name for hardware in machines if dtype not in hardware.gpu.flops)
    failures = f"GPUs fail once in {FAILURE_GPU_HOURS:,.0f} hours. `--time-between-preemptions HOURS`: spot machines."
    if options.hours_between_preemptions is not None:
        failures = f"The job is preempted every {options.hours_between_preemptions:g} hours; prices are those of spot."
    return Plan(
        job=job,
        job_file=loaded.path.name,
        machines=planned,
        assumptions=[
            *sentences,
            job.counts.sentence,
            *(
                f"{name} has no {dtype} units: {_INSTEAD.get(dtype, 'the speed of fp32 is assumed.')}"
                for name in lacking
            ),
            f"Matrix products reach {TRAINING_SHARE:.0%} of the speed of the GPU's largest ones (`matmul_share` in the "
            "table). Published runs differ from this by up to 25%: docs/how-to/planning.md.",
            f"A step may take {USABLE_SHARE:.0%} of a GPU's memory: the allocator loses some to fragmentation.",
            failures,
            f"A restart takes {RESTART_SECONDS / 60:g} minutes; checkpoints are written at {DISK_BANDWIDTH / 1e9:g} "
            "GB/s. Evaluation, start-up and export are not counted.",
            "Prices come from finetune/runtime/gpu_prices.yaml, without storage, traffic and discounts: --prices FILE.",
        ],
        seconds=time.monotonic() - started,
    )


_INSTEAD = {
    "bf16": "the speed of fp32 is assumed. Write train.precision: fp16.",
    "fp8": "a run is refused there. Write train.precision: bf16.",
}


def choose_machines(options: PlanOptions) -> tuple[list[Hardware], list[str]]:
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
        f"This machine has no GPU: planned for {common}. Write --gpus 8xH100-80GB for other GPUs, and all strategies."
    )
    return [parse(text) for text in COMMON_HARDWARE], [note]


def _plan_hardware(
    job: PlannedJob, hardware: Hardware, predict: Predict, options: PlanOptions, *, tries_methods: bool
) -> HardwarePlan:
    print(f"planning for {hardware} ...", file=sys.stderr, flush=True)
    prices = prices_of(hardware.gpu.name, table=options.prices, gpu_table=options.gpu_table)
    plans = plan_strategies(job, hardware, predict)
    best = choose_strategy_plan(plans)
    # The chosen strategy with the other recomputation, and with the other methods.
    strategy = best.strategy if best is not None else ("fsdp2" if hardware.num_gpus > 1 else "single")
    tensor_size = best.layout.tensor_size if best is not None else 1
    methods: tuple[Method, ...] = ("full", "lora", "qlora")
    variants = [(job.method, not job.checkpointing), *((method, True) for method in methods if method != job.method)]
    return HardwarePlan(
        hardware=hardware,
        plans=plans,
        best=best,
        why=_why(best, plans),
        outlook=None
        if best is None
        else make_outlook(
            job, hardware, best, prices=prices, hours_between_preemptions=options.hours_between_preemptions
        ),
        variants=[
            plan_strategy(
                strategy, job, hardware, predict, method=method, checkpointing=recomputes, tensor_size=tensor_size
            )
            for method, recomputes in (variants if tries_methods else ())
        ],
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
    too_large = [other.strategy for other in simpler if other.prediction is not None and not other.fits]
    fitting = [other.strategy for other in plans if other.fits and other.layout.num_ranks == best.layout.num_ranks]
    parts = [f"{', '.join(too_large)} would run out of memory"] if too_large else []
    if len(fitting) > 1:
        names = ", ".join(sorted(fitting))
        parts.append(f"it is the fastest of {names}, or the simplest of those nearly as fast")
    return f"{best.strategy}: " + ("; ".join(parts) or "it is the only one that fits") + "."
