"""What weights, gradients and optimizer state take on one rank, as arithmetic that can be checked by eye."""

from dataclasses import dataclass

from finetune.runtime.amounts import size_text


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per rank before any activation."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    lines: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """Return the sum of the three."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


MOMENTS = {"adamw": 2, "muon": 2, "schedule_free_adamw": 2, "sgd": 1, "adafactor": 0}
"""Numbers of optimizer state per trained one; Adafactor's, a row and a column per matrix, are next to none.

Muon keeps 1 for a hidden matrix and 2 for anything else.
"""

AVERAGE_BYTES = 4
"""Bytes of `train.average` per trained number."""

_STATE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0 + 4 / 256}  # the last with a float32 scale for 256


def state_bytes(optimizer: str, state_dtype: str | None, *, num_trained: int, trained_bytes: int) -> int:
    """Return what the optimizer keeps: in `state_dtype`, or in the type of what learns."""
    if optimizer == "adamw_8bit":
        return round(2 * _STATE_BYTES["int8"] * num_trained)
    of_one = _STATE_BYTES[state_dtype] if state_dtype else trained_bytes / max(1, num_trained)
    return round(MOMENTS[optimizer] * of_one * num_trained)


def estimate(
    *,
    weights_bytes: int,
    gradients_bytes: int,
    optimizer_bytes: int,
    shards: int,
    shards_weights: bool,
    shards_gradients: bool,
    shards_optimizer: bool,
    is_beside_teacher: bool = False,
) -> MemoryEstimate:
    """Return what one of `shards` ranks holds, each part divided among them where the strategy shards it.

    Activations are not counted: they depend on batch and length. Neither is a teacher, which tells its own size.
    """
    parts = (
        ("weights", weights_bytes, shards if shards_weights else 1),
        ("gradients", gradients_bytes, shards if shards_gradients else 1),
        ("optimizer state", optimizer_bytes, shards if shards_optimizer else 1),
    )
    held = [-(-size // among) for _, size, among in parts]
    lines = [
        _line(name, size=size, among=among, held=part) for (name, size, among), part in zip(parts, held, strict=True)
    ]
    summands = " + ".join(f"{name} {size_text(part)}" for (name, _, _), part in zip(parts, held, strict=True))
    beside = "the teacher and activations" if is_beside_teacher else "activations"
    total = f"memory: {size_text(sum(held))} per rank = {summands}, before {beside}"
    return MemoryEstimate(held[0], held[1], held[2], (*lines, total))


def _line(name: str, *, size: int, among: int, held: int) -> str:
    if among == 1:
        return f"{name}: {size_text(held)} on every rank"
    return f"{name}: {size_text(held)} per rank = {size_text(size)} / {among} ranks"
