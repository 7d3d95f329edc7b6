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


def estimate(
    *,
    weights_bytes: int,
    trained_bytes: int,
    num_trained: int,
    optimizer_bytes_per_parameter: int,
    shards: int,
    shards_weights: bool,
    shards_gradients: bool,
    shards_optimizer: bool,
) -> MemoryEstimate:
    """Return what one of `shards` ranks holds, each part divided among them where the strategy shards it.

    AdamW keeps 8 bytes per trained parameter (two float32 moments), plus 4 where it keeps float32 master weights beside
    16-bit ones; SGD with momentum 4, without 0. Activations are not counted: they depend on batch and length.
    """
    optimizer_bytes = num_trained * optimizer_bytes_per_parameter
    parts = (
        ("weights", weights_bytes, shards if shards_weights else 1),
        ("gradients", trained_bytes, shards if shards_gradients else 1),
        ("optimizer state", optimizer_bytes, shards if shards_optimizer else 1),
    )
    held = [-(-size // among) for _, size, among in parts]
    lines = [
        _line(name, size=size, among=among, held=part) for (name, size, among), part in zip(parts, held, strict=True)
    ]
    summands = " + ".join(f"{name} {size_text(part)}" for (name, _, _), part in zip(parts, held, strict=True))
    total = f"memory: {size_text(sum(held))} per rank = {summands}, before activations"
    return MemoryEstimate(held[0], held[1], held[2], (*lines, total))


def _line(name: str, *, size: int, among: int, held: int) -> str:
    if among == 1:
        return f"{name}: {size_text(held)} on every rank"
    return f"{name}: {size_text(held)} per rank = {size_text(size)} / {among} ranks"
