"""`run:` - what the run is called, where it writes, and what makes it repeatable."""

from typing import Literal

from finetune.config.section import Count, Path, Section, key

StrategyName = Literal["single", "ddp", "fsdp1", "fsdp2", "hsdp", "zero1", "zero2", "zero3"]


class RunSection(Section):
    """What the run is called, where it writes, and what makes it repeatable."""

    folder: Path = key("Folder that the run owns: config, events, checkpoints and `final/` are written into it.")
    seed: Count = key("Seed of everything random: weights, adapters, data order, dropout.", 42)
    deterministic: bool = key("Use only deterministic kernels; slower, bitwise repeatable on one machine.", False)
    strategy: StrategyName | None = key(
        "Refuse to start under any other strategy than this one. Unset: whatever the accelerate config says.", None
    )
