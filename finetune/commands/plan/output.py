"""A plan as JSON and on the terminal: the chosen strategy first, a table of strategies or machines, the assumptions."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from finetune.commands.plan.assumptions import GPUS_PER_NODE
from finetune.commands.plan.hardware import Hardware
from finetune.commands.plan.outlook import Outlook
from finetune.commands.plan.planned_job import PlannedJob
from finetune.commands.plan.strategies import StrategyPlan, accelerate_file
from finetune.commands.printing import print_facts, print_table
from finetune.memory.state import TrainingLayout

FORMAT_VERSION = 2
"""Version of the JSON: increased when a key is removed or changes its meaning, not when one is added."""


@dataclass(frozen=True)
class HardwarePlan:
    """The plan for one machine; `best` and `outlook` are None if nothing fits."""

    hardware: Hardware
    plans: Sequence[StrategyPlan]
    best: StrategyPlan | None
    why: str
    outlook: Outlook | None
    variants: Sequence[StrategyPlan]  # the best strategy with other methods


@dataclass(frozen=True)
class Plan:
    """The plan of a job for one or several machines, with its assumptions as sentences."""

    job: PlannedJob
    job_file: str
    machines: Sequence[HardwarePlan]
    assumptions: Sequence[str]
    seconds: float


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the whole plan as plain values."""
    job = plan.job
    return {
        "version": FORMAT_VERSION,
        "job": {
            "file": plan.job_file,
            "method": job.method,
            "gradient_checkpointing": job.checkpointing,
            "precision": job.train.precision,
            "global_batch_size": job.train.global_batch_size,
            "tokens_per_position": job.counts.tokens_per_position,
            "num_steps": job.counts.num_steps,
            "data_is_prepared": job.counts.is_measured,
        },
        "machines": [
            {
                "gpu": planned.hardware.gpu.name,
                "gpus_per_node": planned.hardware.gpus_per_node,
                "num_nodes": planned.hardware.num_nodes,
                "memory_bytes": planned.hardware.gpu.memory_bytes,
                "usable_bytes": planned.hardware.usable_bytes,
                "best": None if planned.best is None else planned.best.strategy,
                "why": planned.why,
                "strategies": [_strategy_json(strategy, planned.hardware) for strategy in planned.plans],
                "variants": [_strategy_json(strategy, planned.hardware) for strategy in planned.variants],
                "outlook": None if planned.outlook is None else asdict(planned.outlook),
            }
            for planned in plan.machines
        ],
        "assumptions": list(plan.assumptions),
        "planned_in_seconds": round(plan.seconds, 1),
    }


_PREDICTED = ["peak_bytes", "parts", "num_parameters", "num_trained", "flops_per_token", "recomputed_flops_per_token"]


def _strategy_json(plan: StrategyPlan, hardware: Hardware) -> dict[str, Any]:
    prediction, time = plan.prediction, plan.time
    return {
        "strategy": plan.strategy,
        "num_gpus": plan.layout.num_ranks,
        "method": plan.layout.method,
        "gradient_checkpointing": plan.layout.gradient_checkpointing,
        "fits": plan.fits,
        "reason": plan.reason,
        "accelerate_file": accelerate_file(plan.strategy, hardware),
        "microbatch_size": plan.layout.microbatch_size if plan.fits else None,
        "num_microbatches": plan.num_microbatches if plan.fits else None,
        **{name: None if prediction is None else getattr(prediction, name) for name in _PREDICTED},
        "step_seconds": None if time is None else time.seconds,
        "step_parts": None if time is None else dict(time.parts),
        "hidden_communication_seconds": None if time is None else time.hidden_seconds,
    }


_GIB = 2**30
_NAMES = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}
_ONE_MACHINE = ("strategy", "peak GiB", "microbatch", "step s", "tokens/s", "note")
_SEVERAL_MACHINES = ("GPUs", "strategy", "microbatch", "tokens/s", "hours", "USD", "note")


def print_plan(plan: Plan) -> None:
    """Print the plan: of one machine all strategies, of several the best one of each."""
    print_facts([("", line) for line in _job_lines(plan)], indent=0)
    if len(plan.machines) > 1:
        print()
        _print_rows(_SEVERAL_MACHINES, [_row(plan.job, planned.best, planned) for planned in plan.machines])
    else:
        (planned,) = plan.machines
        best, hardware = planned.best, planned.hardware
        print(f"\non {hardware}, {hardware.gpu.memory_bytes / _GIB:.1f} GiB each")
        print_facts(_facts(plan, planned))
        print()
        others = [other for other in planned.plans if other is not best and other.prediction is not None]
        _print_rows(_ONE_MACHINE, [_row(plan.job, each, planned) for each in (*([best] if best else []), *others)])
        names_by_reason: dict[str, list[str]] = {}
        for strategy in planned.plans:
            if strategy.prediction is None:
                names_by_reason.setdefault(strategy.reason or "", []).append(strategy.strategy)
        print_facts([("", f"{', '.join(names)}: {reason}") for reason, names in names_by_reason.items()], indent=0)
    print("\nassumed")
    print_facts((("  -", sentence) for sentence in plan.assumptions), indent=4)
    print(f"\nplanned in {plan.seconds:.1f} s; no weights were loaded")


def _job_lines(plan: Plan) -> Iterable[str]:
    job, counts = plan.job, plan.job.counts
    predictions = (strategy.prediction for planned in plan.machines for strategy in planned.plans)
    sizes = next((prediction for prediction in predictions if prediction is not None), None)
    trained = ""
    if sizes is not None:
        trained = f"{_format_number(sizes.num_trained)} of {_format_number(sizes.num_parameters)} parameters trained, "
    recomputation = f"model.gradient_checkpointing={str(job.checkpointing).lower()}"
    yield f"{plan.job_file}: {_NAMES[job.method]}, {trained}{job.train.precision}, {recomputation}"
    batch = f"{job.train.global_batch_size} {job.config.data.batching.unit}"
    steps = "" if counts.num_steps is None else f", {counts.num_steps:,} steps"
    yield f"{batch} of {counts.tokens_per_position:,.0f} tokens per step{steps}"


def _print_rows(columns: Sequence[str], rows: Iterable[dict[str, str]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, pad_edge=False)
    for name in columns:
        is_text = name in ("GPUs", "strategy", "note")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=name != "note")
    for row in rows:
        table.add_row(*(row.get(name, "") for name in columns))
    print_table(table)


def _row(job: PlannedJob, strategy: StrategyPlan | None, planned: HardwarePlan) -> dict[str, str]:
    """Return the cells of a strategy by the name of the column."""
    hardware, outlook = planned.hardware, planned.outlook
    row = {"GPUs": str(hardware), "note": planned.why}
    if strategy is None or strategy.prediction is None:
        return row
    row |= {"strategy": strategy.strategy, "peak GiB": f"{strategy.prediction.peak_bytes / _GIB:.1f}"}
    if not strategy.fits or strategy.time is None:
        return row | {"note": strategy.reason or ""}
    notes = []
    if strategy.layout.num_ranks < hardware.num_gpus:
        notes.append(f"on one of the {hardware.num_gpus} GPUs")
    if strategy.strategy.endswith("_offload"):
        host = 16 * strategy.prediction.num_trained / hardware.num_nodes
        notes.append(f"needs {host / _GIB:,.0f} GiB of host memory")
    waits = strategy.time.parts.get("communication", 0.0) / strategy.time.seconds
    notes += [f"{waits:.0%} of the time waits for communication"] if waits >= 0.05 else []
    usd = outlook.offers[0].usd if outlook is not None and outlook.offers else None
    return row | {
        "microbatch": str(strategy.layout.microbatch_size),
        "step s": f"{strategy.time.seconds:.3g}",
        "tokens/s": f"{job.tokens_per_step / strategy.time.seconds:,.0f}",
        "hours": "?" if outlook is None or outlook.hours is None else f"{outlook.hours:,.1f}",
        "USD": "?" if usd is None else f"{usd:,.2f}",
        "note": "; ".join(notes),
    }


def _facts(plan: Plan, planned: HardwarePlan) -> Iterable[tuple[str, str]]:
    best, outlook, hardware = planned.best, planned.outlook, planned.hardware
    variants = [variant for variant in planned.variants if variant.fits and variant.time is not None]
    if best is None or best.prediction is None or best.time is None or outlook is None:
        larger = "Use more or larger GPUs, shorter samples, LoRA or QLoRA."
        yield "fits", f"no. {planned.why} {f'It would fit with {_method(variants[0].layout)}.' if variants else larger}"
        return
    layout = best.layout
    size = f"train.microbatch_size={layout.microbatch_size}"
    shape = f"{layout.num_ranks} x {layout.microbatch_size} x {best.num_microbatches} accumulated"
    yield "use", f"{best.strategy}, {size}: {shape}"
    yield "why", planned.why
    yield "launch", _launch_line(plan.job_file, best, hardware)
    parts = sorted(best.prediction.parts.items(), key=lambda part: -part[1])
    largest = ", ".join(f"{name} {_gib(part)}" for name, part in parts)
    yield "memory", f"{_gib(best.prediction.peak_bytes)} of {_gib(hardware.usable_bytes)} usable: {largest}"
    seconds = ", ".join(f"{name} {value:.3g} s" for name, value in best.time.parts.items() if value)
    hidden = f"; {best.time.hidden_seconds:.2g} s of communication are hidden" if best.time.hidden_seconds else ""
    yield "step", f"{outlook.step_seconds:.3g} s: {seconds}{hidden}"
    if best.compilation is not None:
        yield "compile", f"{'regional' if best.compilation.pays else 'off'}: {best.compilation}"
    rate, checkpoints = outlook.tokens_per_second, outlook.checkpoints
    yield "speed", f"{rate:,.0f} tokens/s, {rate / layout.num_ranks:,.0f} per GPU, {outlook.mfu:.0%} MFU"
    if outlook.num_tokens is None:
        yield "job", "the number of steps is unknown: prices are per million tokens"
    elif outlook.hours is None:
        yield "job", "never ends: it is preempted before it has restarted"
    else:
        yield "job", f"{_format_hours(outlook.hours)} for {_format_number(outlook.num_tokens)} tokens"
    for offer in outlook.offers:
        total = "" if offer.usd is None else f"{offer.usd:,.2f} USD, "
        rates = f"{offer.usd_per_million_tokens:.4f} per million tokens, {offer.usd_per_gpu_hour:.2f} per GPU-hour"
        yield "price", f"{total}{rates} ({offer.provider})"
    yield (
        "checkpoint",
        f"{checkpoints.size_bytes / 1e9:.3g} GB, blocks training for {checkpoints.stall_seconds:.2g} s. With a failure "
        f"every {checkpoints.hours_between_failures:,.3g} hours: checkpoint.every_steps={checkpoints.every_steps} "
        f"({_format_hours(checkpoints.interval_seconds / 3600)})",
    )
    for variant in variants:
        assert variant.time is not None
        speed = f"{plan.job.tokens_per_step / variant.time.seconds:,.0f} tokens/s"
        yield "or", f"{_method(variant.layout)}: {speed} with train.microbatch_size={variant.layout.microbatch_size}"


def _launch_line(job_file: str, best: StrategyPlan, hardware: Hardware) -> str:
    words = ["accelerate launch --config_file", accelerate_file(best.strategy, hardware)]
    if best.strategy != "single":
        words.append(f"--num_processes {best.layout.num_ranks}")
    if hardware.num_nodes > 1:
        words.append(f"--num_machines {hardware.num_nodes} --machine_rank N --main_process_ip IP")
    words.append(f"-m finetune --config {job_file} --set train.microbatch_size={best.layout.microbatch_size}")
    is_as_shipped = (hardware.num_nodes, hardware.gpus_per_node) == (2, GPUS_PER_NODE)
    if best.strategy == "hsdp" and not is_as_shipped:
        words.append(f"(set dp_replicate_size {hardware.num_nodes} and dp_shard_size {hardware.gpus_per_node} in it)")
    return " ".join(words)


def _method(layout: TrainingLayout) -> str:
    return f"{_NAMES[layout.method]}, model.gradient_checkpointing={str(layout.gradient_checkpointing).lower()}"


def _gib(size: float) -> str:
    return f"{size / _GIB:.1f} GiB" if size >= 0.05 * _GIB else f"{size / 2**20:.0f} MiB"


def _format_hours(hours: float) -> str:
    if hours < 1 / 60:
        return f"{hours * 3600:.0f} s"
    if hours < 1:
        return f"{hours * 60:.0f} min"
    return f"{hours:.1f} hours" if hours < 72 else f"{hours / 24:.1f} days"


def _format_number(number: float) -> str:
    for unit, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,.0f}"
