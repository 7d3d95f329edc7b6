"""From a job and a prediction to the work of a step, as the cost model wants it."""

from finetune.commands.plan.cost.assumptions import (
    ADAPTED_TRAFFIC_PER_HIDDEN,
    FUSED_TRAFFIC_PER_HIDDEN,
    TRAFFIC_PER_HIDDEN,
    TRAFFIC_PER_INTERMEDIATE,
)
from finetune.commands.plan.cost.step_time import Work
from finetune.commands.plan.job import PlannedJob
from finetune.memory.layout import Layout, Prediction

_STORED_BYTES = {4: 0.5, 8: 1.0}
_UNKNOWN_LAYERS = 24


def step_work(job: PlannedJob, layout: Layout, prediction: Prediction, *, num_microbatches: int) -> Work:
    """Return what one rank computes and what is sent in a step of the job under the layout."""
    parameters, trained = prediction.num_parameters, prediction.num_trained
    recomputes = prediction.recomputed_flops_per_token > 0
    is_copied = layout.strategy in ("single", "ddp") and job.is_autocast and layout.method == "full"
    passes = 3 if recomputes else 2
    # FSDP2 and ZeRO reduce gradients in float32, DDP in the type of the weights.
    is_half = layout.strategy == "ddp" and layout.method == "full" and job.config.model.dtype != "float32"
    return Work(
        num_tokens=layout.microbatch_size * job.counts.tokens_per_position,
        num_microbatches=num_microbatches,
        flops_per_token=prediction.flops_per_token,
        recomputed_flops_per_token=prediction.recomputed_flops_per_token,
        traffic_per_token=_traffic(job, layout),
        num_layers=job.shapes.layers if job.shapes is not None else _UNKNOWN_LAYERS,
        num_parameters=parameters,
        num_trained=trained,
        weight_bytes=parameters * _gathered_bytes(job, layout),
        gradient_bytes=trained * (2.0 if is_half else 4.0),
        trained_weight_bytes=trained * job.compute_bytes,
        num_casts=(passes - 1 if is_copied else 0),
        dequantized_bytes=passes * 2.5 * parameters if layout.method == "qlora" else 0.0,
    )


def checkpoint_bytes(job: PlannedJob, prediction: Prediction, *, optimizer_bytes: int) -> int:
    """Return the size of a checkpoint: the trained weights and the optimizer's state."""
    item_bytes = 4 if job.config.model.dtype == "float32" or prediction.num_trained < prediction.num_parameters else 2
    return prediction.num_trained * item_bytes + optimizer_bytes


def _traffic(job: PlannedJob, layout: Layout) -> float:
    shapes = job.shapes
    if shapes is None:
        return 0.0
    hidden = TRAFFIC_PER_HIDDEN if job.config.model.compile == "off" else FUSED_TRAFFIC_PER_HIDDEN
    hidden += 0.0 if layout.method == "full" else ADAPTED_TRAFFIC_PER_HIDDEN
    per_layer = hidden * shapes.hidden + TRAFFIC_PER_INTERMEDIATE * shapes.intermediate
    return shapes.layers * per_layer * (job.compute_bytes / 2)


def _gathered_bytes(job: PlannedJob, layout: Layout) -> float:
    """Return the bytes per weight that are read and gathered: quantized ones as they are stored."""
    if layout.method != "qlora":
        return float(job.compute_bytes)
    quantization = job.config.model.quantization
    return _STORED_BYTES[quantization.bits if quantization is not None else 4]
