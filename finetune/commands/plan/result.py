"""A plan, and its JSON form."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from finetune.commands.plan.cost.scaling import ScalePoint, amdahl_share, efficiency, most_that_pay
from finetune.commands.plan.hardware import Hardware
from finetune.commands.plan.job import PlannedJob
from finetune.commands.plan.outlook import Offer, Outlook
from finetune.commands.plan.strategies import StrategyPlan, accelerate_file

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
    hardware, best = planned.hardware, planned.best
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
        "outlook": None if planned.outlook is None else _outlook_json(planned.outlook),
        "scaling": _scaling_json(planned.points),
    }


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
        "peak_bytes": None if prediction is None else prediction.peak_bytes,
        "parts": None if prediction is None else dict(prediction.parts),
        "num_parameters": None if prediction is None else prediction.num_parameters,
        "num_trained": None if prediction is None else prediction.num_trained,
        "flops_per_token": None if prediction is None else prediction.flops_per_token,
        "recomputed_flops_per_token": None if prediction is None else prediction.recomputed_flops_per_token,
        "step_seconds": None if time is None else time.seconds,
        "step_parts": None if time is None else dict(time.parts),
        "hidden_communication_seconds": None if time is None else time.hidden_seconds,
    }


def _outlook_json(outlook: Outlook) -> dict[str, Any]:
    plain = {
        name: getattr(outlook, name)
        for name in ("tokens_per_second", "step_seconds", "num_steps", "num_tokens", "hours", "mfu")
    }
    saving = {"on_demand": asdict(outlook.saving_on_demand), "spot": asdict(outlook.saving_spot)}
    return {**plain, "checkpoints": saving, "prices": [_offer_json(offer) for offer in outlook.offers]}


def _offer_json(offer: Offer) -> dict[str, Any]:
    price = offer.price
    return {
        "provider": price.provider,
        "offer": "spot" if offer.is_spot else "on demand",
        "usd_per_gpu_hour": price.spot if offer.is_spot else price.on_demand,
        "hours": offer.hours,
        "usd": offer.usd,
        "usd_per_million_tokens": offer.usd_per_million_tokens,
        "source": price.source,
    }


def _scaling_json(points: Sequence[ScalePoint]) -> Mapping[str, Any]:
    if not points:
        return {"points": [], "serial_share": None, "most_that_pay": None}
    return {
        "points": [
            {**asdict(point), "efficiency": share, "tokens_per_usd": point.tokens_per_usd}
            for point, share in zip(points, efficiency(points), strict=True)
        ],
        "serial_share": amdahl_share(points),
        "most_that_pay": most_that_pay(points).num_gpus,
    }
