"""`run:` - what the run is called, where it writes, and what makes it repeatable."""

from typing import Literal

from finetune.config.section import YEAR_SECONDS, Path, Section, Seed, key

StrategyName = Literal["single", "ddp", "fsdp1", "fsdp2", "hsdp", "zero1", "zero2", "zero3"]


class RunSection(Section):
    """What the run is called, where it writes, and what makes it repeatable."""

    folder: Path = key(
        "Folder that the run owns: config, events, checkpoints and `final/` are written into it. A URL (`s3://`, "
        "`gs://`, `az://`; extras `s3`, `gcs`, `azure`) is written locally first and uploaded behind the training."
    )
    local_folder: Path | None = key(
        "Where a run at a URL is written before it is uploaded: a folder that every process sees; unset, one in "
        "`~/.cache/finetune/runs`.",
        None,
    )
    seed: Seed = key("Seed of everything random: weights, adapters, data order, dropout.", 42)
    deterministic: bool = key("Use only deterministic kernels; slower, bitwise repeatable on one machine.", False)
    hang_after_seconds: float | None = key(
        "When nothing moves for so long, write down where every process stands, name the slow one and end the run; "
        "`null` waits forever.",
        1800.0,
        gt=0.0,
        le=YEAR_SECONDS,
    )
    spot_notice: Literal["aws", "gcp", "azure"] | None = key(
        "Ask this cloud's metadata service for the notice that a spot machine will be taken; then save and stop.", None
    )
    strategy: StrategyName | None = key(
        "Refuse to start under any other strategy than this one. Unset: whatever the accelerate config says.", None
    )
