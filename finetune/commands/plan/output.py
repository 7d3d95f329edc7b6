"""A plan as JSON and on the terminal: the chosen strategy first, then the alternatives, and the assumptions."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from finetune.commands.plan.assumptions import GPUS_PER_NODE
from finetune.commands.plan.hardware import Hardware
from finetune.commands.plan.outlook import Offer, Outlook, ScalePoint, amdahl_share, efficiency, most_that_pay
from finetune.commands.plan.planned_job import PlannedJob
from finetune.commands.plan.strategies import StrategyPlan, accelerate_file
from finetune.commands.printing import print_facts, print_table
from finetune.memory.state import Prediction

FORMAT_VERSION = 1
"""Version of the JSON: increased when a key is removed or changes its meaning, not when one is added."""


@dataclass(frozen=True)
class HardwarePlan:
    """The plan for one machine; `best` and `outlook` are None if nothing fits."""

    hardware: Hardware
    plans: Sequence[StrategyPlan]
    best: StrategyPlan | None
    why: str
    outlook: Outlook | None
    points: Sequence[ScalePoint]
    variants: Sequence[StrategyPlan]


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
        "machines": [_hardware_json(machine) for machine in plan.machines],
        "assumptions": list(plan.assumptions),
        "planned_in_seconds": round(plan.seconds, 1),
    }


def _hardware_json(planned: HardwarePlan) -> dict[str, Any]:
    hardware, best, points = planned.hardware, planned.best, planned.points
    outlook = None
    if planned.outlook is not None:
        outlook = {
            name: getattr(planned.outlook, name)
            for name in ("tokens_per_second", "step_seconds", "num_steps", "num_tokens", "hours", "mfu")
        }
        outlook["checkpoints"] = {
            "on_demand": asdict(planned.outlook.saving_on_demand),
            "spot": asdict(planned.outlook.saving_spot),
        }
        outlook["prices"] = [
            {
                "provider": offer.price.provider,
                "offer": "spot" if offer.is_spot else "on demand",
                "usd_per_gpu_hour": offer.price.spot if offer.is_spot else offer.price.on_demand,
                "hours": offer.hours,
                "usd": offer.usd,
                "usd_per_million_tokens": offer.usd_per_million_tokens,
                "source": offer.price.source,
            }
            for offer in planned.outlook.offers
        ]
    return {
        "gpu": hardware.gpu.name,
        "gpus_per_node": hardware.gpus_per_node,
        "num_nodes": hardware.num_nodes,
        "memory_bytes": hardware.gpu.memory_bytes,
        "usable_bytes": hardware.usable_bytes,
        "fits": best is not None,
        "best": None if best is None else best.strategy,
        "why": planned.why,
        "strategies": [_strategy_json(strategy, hardware) for strategy in planned.plans],
        "variants": [_strategy_json(strategy, hardware) for strategy in planned.variants],
        "outlook": outlook,
        "scaling": {
            "points": [
                {**asdict(point), "efficiency": share, "tokens_per_usd": point.tokens_per_usd}
                for point, share in zip(points, efficiency(points), strict=True)
            ],
            "serial_share": amdahl_share(points),
            "most_that_pay": most_that_pay(points).num_gpus if points else None,
        },
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
_WORTH_A_HINT = 1.05
_NAMES = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}


def print_plan(plan: Plan) -> None:
    """Print the plan: all tables for one machine, one line per machine for several."""
    _print_job(plan)
    if len(plan.machines) == 1:
        _print_strategies(plan, plan.machines[0])
        _print_prices(plan.machines[0])
    else:
        _print_several(plan)
    print("\nassumed")
    print_facts((("  -", sentence) for sentence in plan.assumptions), indent=4)
    print(f"\nplanned in {plan.seconds:.1f} s; no weights were loaded")


def _print_job(plan: Plan) -> None:
    job, counts = plan.job, plan.job.counts
    sizes = next(
        (strategy.prediction for hardware in plan.machines for strategy in hardware.plans if strategy.prediction), None
    )
    trained = ""
    if sizes is not None:
        is_whole = sizes.num_trained == sizes.num_parameters
        share = "all trained" if is_whole else f"{_format_number(sizes.num_trained)} trained"
        trained = f", {_format_number(sizes.num_parameters)} parameters, {share}"
    steps = "" if counts.num_steps is None else f", {counts.num_steps:,} steps"
    method = f"{_NAMES[job.method]}{trained}, {job.train.precision}, {_format_recomputation(job.checkpointing)}"
    batch = f"{job.train.global_batch_size} {job.config.data.batching.unit}"
    shape = f"{batch} of {counts.tokens_per_position:,.0f} tokens per step{steps}"
    print_facts([("", f"{plan.job_file}: {method}"), ("", shape)], indent=0)


def _format_recomputation(checkpointing: object) -> str:
    if checkpointing is False:
        return "no recomputation"
    return "activations recomputed" if checkpointing is True else f"recomputation {checkpointing}"


def _print_several(plan: Plan) -> None:
    table = _table("GPUs", "strategy", "peak", "microbatch", "tokens/s", "hours", "cheapest")
    for planned in plan.machines:
        best, outlook = planned.best, planned.outlook
        if best is None or outlook is None:
            table.add_row(str(planned.hardware), "does not fit", *[""] * 5)
            continue
        offer = min((offer for offer in outlook.offers if not offer.is_spot), key=_cost_of_tokens, default=None)
        if offer is None or offer.usd_per_million_tokens is None:
            cheapest = "no price known" if offer is None else "never ends"
        elif offer.usd is None:
            cheapest = f"${offer.usd_per_million_tokens:.3f} per million tokens"
        else:
            dollars = f"${offer.usd:,.2f}" if offer.usd < 100 else f"${offer.usd:,.0f}"
            cheapest = f"{dollars} ({offer.price.provider})"
        table.add_row(
            str(planned.hardware),
            best.strategy,
            _format_peak(best.prediction),
            str(best.layout.microbatch_size),
            f"{outlook.tokens_per_second:,.0f}",
            _format_hours(outlook.hours),
            cheapest,
        )
    print()
    print_table(table)


def _print_strategies(plan: Plan, planned: HardwarePlan) -> None:
    job, hardware, best = plan.job, planned.hardware, planned.best
    print(f"\non {hardware}, {hardware.gpu.memory_bytes / _GIB:.1f} GiB each")
    if best is None:
        print_facts([("fits", f"no. {_advice(planned)}")])
    else:
        assert planned.outlook is not None
        print_facts(_facts(plan, planned, best, planned.outlook))
    print()
    table = _table("strategy", "peak GiB", "fits", "microbatch", "step s", "tokens/s", "note")
    others = [other for other in planned.plans if other is not best and other.prediction is not None]
    for shown in [*([best] if best is not None else []), *others]:
        table.add_row(shown.strategy, *_cells(shown, planned), style="bold" if shown is best else None)
    print_table(table)
    strategies: dict[str, list[str]] = {}
    for strategy in planned.plans:
        if strategy.prediction is None:
            strategies.setdefault(strategy.reason or "", []).append(strategy.strategy)
    for reason, names in strategies.items():
        print_facts([("", f"{', '.join(names)}: {reason}")], indent=0)
    if planned.variants:
        print("\nother methods, with this strategy" if best else "\nother methods")
        table = _table("method", "recompute", "peak GiB", "fits", "microbatch", "step s", "tokens/s", "note")
        tokens = job.train.global_batch_size * job.counts.tokens_per_position
        for variant in planned.variants:
            layout, prediction, time = variant.layout, variant.prediction, variant.time
            is_own = (layout.method, layout.gradient_checkpointing) == (job.method, job.checkpointing)
            speed = ["no", "", "", ""]
            if variant.fits and time is not None:
                per_second = f"{tokens / time.seconds:,.0f}"
                speed = ["yes", str(layout.microbatch_size), f"{time.seconds:.3g}", per_second]
            table.add_row(
                _NAMES[layout.method],
                "yes" if layout.gradient_checkpointing else "no",
                "" if prediction is None else f"{prediction.peak_bytes / _GIB:.1f}",
                *speed,
                "this job" if is_own else (variant.reason or ""),
            )
        print_table(table)


def _print_prices(planned: HardwarePlan) -> None:
    """Print what the job costs, and its speed and cost on other numbers of GPUs."""
    if planned.outlook is not None and planned.outlook.offers:
        print("\nprice of the job, including preemptions and failures")
        table = _table("provider", "offer", "USD/GPU-hour", "hours", "USD", "USD/million tokens")
        for offer in sorted(planned.outlook.offers, key=_cost_of_tokens):
            price = offer.price.spot if offer.is_spot else offer.price.on_demand
            table.add_row(
                offer.price.provider,
                "spot" if offer.is_spot else "on demand",
                f"{price:.2f}",
                "" if offer.hours is None else f"{offer.hours:,.1f}",
                "" if offer.usd is None else f"{offer.usd:,.2f}",
                "never ends" if offer.usd_per_million_tokens is None else f"{offer.usd_per_million_tokens:.4f}",
            )
        print_table(table)
    if len(planned.points) > 1:
        print(f"\nscaling ({planned.hardware.gpu.name}, same global batch)")
        table = _table("GPUs", "strategy", "tokens/s", "efficiency", "hours", "USD", "million tokens/USD")
        tokens = None if planned.outlook is None else planned.outlook.num_tokens
        for point, share in zip(planned.points, efficiency(planned.points), strict=True):
            hours = None if tokens is None else tokens / point.tokens_per_second / 3600
            price, per_usd = point.usd_per_gpu_hour, point.tokens_per_usd
            table.add_row(
                f"{point.num_gpus}",
                point.strategy,
                f"{point.tokens_per_second:,.0f}",
                f"{share:.0%}",
                "" if hours is None else f"{hours:,.1f}",
                "" if hours is None or price is None else f"{hours * price * point.num_gpus:,.2f}",
                "" if per_usd is None else f"{per_usd / 1e6:,.2f}",
                style="bold" if point.num_gpus == planned.hardware.num_gpus else None,
            )
        print_table(table)
        paying, serial = most_that_pay(planned.points), amdahl_share(planned.points)
        limit = f"; {serial:.1%} of a step does not scale with the number of GPUs (Amdahl)" if serial else ""
        scaling_sentence = f"Up to {paying.num_gpus} GPUs, efficiency is at least 75%{limit}."
        print_facts([("", scaling_sentence)], indent=0)


def _advice(planned: HardwarePlan) -> str:
    fitting = [variant for variant in planned.variants if variant.fits]
    if fitting:
        method = (
            f"{_NAMES[fitting[0].layout.method]}, {_format_recomputation(fitting[0].layout.gradient_checkpointing)}"
        )
        return f"{planned.why} It would fit with {method}: see below."
    enough = [point.num_gpus for point in planned.points if point.num_gpus > planned.hardware.num_gpus]
    more = f" It would on {min(enough)} GPUs." if enough else ""
    return planned.why + (more or " Use more or larger GPUs, shorter samples, LoRA or QLoRA.")


def _facts(plan: Plan, planned: HardwarePlan, best: StrategyPlan, outlook: Outlook) -> Iterable[tuple[str, str]]:
    assert best.prediction is not None and best.time is not None
    layout, parts = best.layout, best.prediction.parts
    size = f"train.microbatch_size={layout.microbatch_size}"
    yield (
        "use",
        f"{best.strategy}, {size}: {layout.num_ranks} x {layout.microbatch_size} x {best.num_microbatches} accumulated",
    )
    yield "why", planned.why
    hardware = planned.hardware
    words = ["accelerate launch --config_file", accelerate_file(best.strategy, hardware)]
    if best.strategy != "single":
        words.append(f"--num_processes {best.layout.num_ranks}")
    if hardware.num_nodes > 1:
        words.append(f"--num_machines {hardware.num_nodes} --machine_rank N --main_process_ip IP")
    line = " ".join(
        [*words, f"-m finetune --config {plan.job_file} --set train.microbatch_size={best.layout.microbatch_size}"]
    )
    is_as_shipped = (hardware.num_nodes, hardware.gpus_per_node) == (2, GPUS_PER_NODE)
    if best.strategy == "hsdp" and hardware.num_nodes > 1 and not is_as_shipped:
        line += f" (set dp_replicate_size {hardware.num_nodes} and dp_shard_size {hardware.gpus_per_node} in the file)"
    yield "launch", line
    largest = ", ".join(f"{name} {_gib(size)}" for name, size in sorted(parts.items(), key=lambda part: -part[1]))
    yield "memory", f"{_format_peak(best.prediction)} of {_gib(planned.hardware.usable_bytes)} usable: {largest}"
    seconds = ", ".join(f"{name} {value:.3g} s" for name, value in best.time.parts.items() if value)
    hidden = f"; {best.time.hidden_seconds:.2g} s of communication are hidden" if best.time.hidden_seconds else ""
    yield "step", f"{outlook.step_seconds:.3g} s: {seconds}{hidden}"
    if best.compilation is not None:
        yield "compile", f"{'regional' if best.compilation.pays else 'off'}: {best.compilation}"
    per_gpu = outlook.tokens_per_second / layout.num_ranks
    yield (
        "speed",
        f"{outlook.tokens_per_second:,.0f} tokens/s, {per_gpu:,.0f} per GPU, {outlook.mfu:.0%} MFU",
    )
    if outlook.hours is not None and outlook.num_tokens is not None:
        yield "job", f"{_format_hours(outlook.hours)} for {_format_number(outlook.num_tokens)} tokens"
    else:
        yield "job", "the number of steps is unknown: prices are per million tokens"
    spot, on_demand = outlook.saving_spot, outlook.saving_on_demand
    spot_interval = _format_hours(spot.interval_seconds / 3600)
    on_demand_interval = _format_hours(on_demand.interval_seconds / 3600)
    yield (
        "checkpoint",
        f"{spot.size_bytes / 1e9:.3g} GB, blocks training for {spot.stall_seconds:.2g} s. On spot machines, with a "
        f"preemption every {spot.hours_between_failures:.3g} hours, checkpoint.every_steps: {spot.every_steps} "
        f"({spot_interval}); on demand {on_demand.every_steps} ({on_demand_interval})",
    )
    yield from _hint(plan.job, planned, best)


def _hint(job: PlannedJob, planned: HardwarePlan, best: StrategyPlan) -> Iterable[tuple[str, str]]:
    """Yield the speedup from recomputing less, or from recomputing to fit larger microbatches."""
    assert best.time is not None
    for variant in planned.variants:
        other, time = variant.layout.gradient_checkpointing, variant.time
        if time is None or not variant.fits or variant.layout.method != job.method or other == job.checkpointing:
            continue
        if time.seconds * _WORTH_A_HINT < best.time.seconds:
            gain = best.time.seconds / time.seconds - 1
            keys = f"model.gradient_checkpointing={str(other).lower()} --set train.microbatch_size"
            yield "faster", f"--set {keys}={variant.layout.microbatch_size} would be {gain:.0%} faster"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(
            name, justify="left" if number == 0 or name in _LEFT else "right", no_wrap=name not in _WRAPPED
        )
    return table


_LEFT = ("strategy", "note", "recompute", "offer", "source")
_WRAPPED = ("note", "source")


def _cells(strategy: StrategyPlan, planned: HardwarePlan) -> list[str]:
    peak = "" if strategy.prediction is None else f"{strategy.prediction.peak_bytes / _GIB:.1f}"
    if not strategy.fits or strategy.time is None:
        return [peak, "no", "", "", "", strategy.reason or ""]
    outlook, best, tokens = planned.outlook, planned.best, ""
    if outlook is not None and best is not None and best.time is not None:
        tokens = f"{outlook.tokens_per_second * best.time.seconds / strategy.time.seconds:,.0f}"
    notes = []
    if strategy is planned.best:
        notes.append("recommended")
    if strategy.layout.num_ranks < planned.hardware.num_gpus:
        notes.append(f"on one of the {planned.hardware.num_gpus} GPUs")
    if strategy.strategy.endswith("_offload") and strategy.prediction is not None:
        host = 16 * strategy.prediction.num_trained / planned.hardware.num_nodes
        notes.append(f"needs {host / _GIB:,.0f} GiB of host memory")
    waits = strategy.time.parts.get("communication", 0.0) / strategy.time.seconds
    notes += [f"{waits:.0%} of the time waits for communication"] if waits >= 0.05 else []
    return [peak, "yes", str(strategy.layout.microbatch_size), f"{strategy.time.seconds:.3g}", tokens, "; ".join(notes)]


def _cost_of_tokens(offer: Offer) -> float:
    return math.inf if offer.usd_per_million_tokens is None else offer.usd_per_million_tokens


def _format_peak(prediction: Prediction | None) -> str:
    return "" if prediction is None else _gib(prediction.peak_bytes)


def _gib(size: float) -> str:
    return f"{size / _GIB:.1f} GiB" if size >= 0.05 * _GIB else f"{size / 2**20:.0f} MiB"


def _format_hours(hours: float | None) -> str:
    if hours is None:
        return "?"
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
