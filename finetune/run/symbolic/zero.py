"""What DeepSpeed's engine holds beside the tensors of a step, as seen in its processes (0.19, ds_configs/)."""

from dataclasses import dataclass

from finetune.config.run_config import RunConfig
from finetune.model.size import AVERAGE_BYTES, optimizer_state_bytes
from finetune.run.symbolic.prediction import Layout
from finetune.run.symbolic.step import BACKWARD, FORWARD_PASS, SymbolicStep
from finetune.run.symbolic.trace import COMPUTE, LAST, UPDATE
from finetune.run.symbolic.tracer import ACTIVATIONS, GATHERED, GRADIENTS, OPTIMIZER, WEIGHTS
from finetune.strategy.upstream import zero_bucket_sizes

KEPT_NUMEL = 5 * 10**8
"""Parameters that ZeRO-3 keeps gathered from forward to backward pass: those used again within a billion numbers of
others (`stage3_max_reuse_distance`), which are half as many, passed twice."""

_DEFAULT_PREFETCH = 5 * 10**7


@dataclass(frozen=True)
class _Engine:
    """The sizes of one rank's engine, in bytes but for the counts."""

    stage: int
    num_ranks: int
    item: int  # of a number in weights, gradients and buffers
    num_trained: float
    bucket: float  # of gradients that are reduced together
    prefetch: float  # of parameters that are gathered together
    offloads: bool


def zero_parts(config: RunConfig, layout: Layout, step: SymbolicStep) -> dict[str, float]:
    """Return what a rank holds at the peak of a step under ZeRO, by name.

    The trace has the weights in the precision of training, as DeepSpeed converts them.
    """
    engine = _engine(config, layout, step)
    num_ranks, trained = engine.num_ranks, engine.num_trained
    share, weights = trained / num_ranks, step.bytes_of(WEIGHTS)
    state = optimizer_state_bytes(
        config.train.optimizer.name,
        config.train.optimizer.state_dtype,
        num_trained=round(trained),
        trained_bytes=round(4 * trained),
    )
    averages = AVERAGE_BYTES * trained if config.train.average else 0
    optimizer = 0.0 if engine.offloads else 4 * share + (state + averages) / num_ranks  # with float32 weights
    if engine.stage == 3:
        return _stage_3(engine, step, weights=weights, optimizer=optimizer)
    buffers = 2 * engine.bucket  # one is filled while the other is reduced
    forward = step.transient(*FORWARD_PASS)
    backward = buffers + max(step.transient(*BACKWARD), step.transient(LAST) + engine.item * share)
    update = (0 if engine.offloads else 4 + engine.item) * share + step.transient(UPDATE)
    found = {WEIGHTS: weights, OPTIMIZER: optimizer}
    if backward >= max(forward, update):
        return {**found, ACTIVATIONS: backward - buffers, GATHERED: buffers}
    return {**found, ACTIVATIONS: forward} if forward > update else {**found, GRADIENTS: update}


def _stage_3(engine: _Engine, step: SymbolicStep, *, weights: float, optimizer: float) -> dict[str, float]:
    """Return the parts where parameters are sharded, too: whole layers exist while they compute, and some longer."""
    share = engine.num_trained / engine.num_ranks
    largest = step.values["largest",] * engine.item
    whole = min(weights, KEPT_NUMEL * engine.item + largest) + min(weights, engine.prefetch)
    computing = step.transient(*FORWARD_PASS, *BACKWARD)
    update = 0.0 if engine.offloads else 4 * min(share, 1e9) + step.transient(UPDATE)
    found = {
        WEIGHTS: 0.0 if engine.offloads else weights / engine.num_ranks,
        GRADIENTS: 0.0 if engine.offloads else engine.item * share,
        OPTIMIZER: optimizer,
    }
    if update > computing + whole:
        return {**found, ACTIVATIONS: update, GATHERED: engine.bucket}
    return {**found, ACTIVATIONS: computing, GATHERED: whole + engine.bucket}


def _engine(config: RunConfig, layout: Layout, step: SymbolicStep) -> _Engine:
    stage, item = int(layout.strategy[4]), 2 if config.train.precision in COMPUTE else 4
    num_trained = step.values["num_trained",]
    width = getattr(step.config.get_text_config(), "hidden_size", 0) or 0
    sizes = zero_bucket_sizes(num_trained=round(num_trained), width=width, stage=stage)
    return _Engine(
        stage=stage,
        num_ranks=layout.num_ranks,
        item=item,
        num_trained=num_trained,
        bucket=item * sizes["reduce_bucket_size"],
        prefetch=item * sizes.get("stage3_prefetch_bucket_size", _DEFAULT_PREFETCH),
        offloads=layout.strategy.endswith("offload") and layout.device == "cuda",
    )
