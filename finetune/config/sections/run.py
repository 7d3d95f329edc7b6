"""`run:` - name, output folder, seed and supervision of the run."""

from typing import Annotated, Literal

from pydantic import Field

from finetune.config.section import Path, Section, Seed, key

StrategyName = Literal["single", "ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3", "tp"]

Command = Annotated[str, Field(max_length=10_000, pattern=r"^[^\x00]*[^\x00\s][^\x00]*$")]


class RunSection(Section):
    """Output folder, seed and supervision of the run."""

    folder: Path = key(
        "Output folder of the run: config, events, checkpoints and `final/`. A URL (`s3://`, "
        "`gs://`, `az://`; extras `s3`, `gcs`, `azure`) is written locally first and uploaded in the background."
    )
    local_folder: Path | None = key(
        "Where a run at a URL is written before it is uploaded: a folder that every process can access; unset, one in "
        "`~/.cache/finetune/runs`.",
        None,
    )
    seed: Seed = key("Seed of all random numbers: weights, adapters, data order, dropout.", 42)
    deterministic: bool = key("Use only deterministic kernels: slower, bitwise reproducible on one machine.", False)
    hang_after_seconds: float | None = key(
        "Without progress for this long, write stack traces of every process, name the slowest one and end the run; "
        "`null` waits forever. Groups of processes wait longer than this, so that the report comes first.",
        1800.0,
        gt=0.0,
        le=20 * 24 * 3600.0,
    )
    spot_notice: Literal["aws", "gcp", "azure"] | None = key(
        "Poll this cloud's metadata service for spot interruption notices; on one, save and stop.", None
    )
    hours_between_interruptions: float | None = key(
        "How often the machines of this job are preempted, for the advice on `checkpoint.every_steps`; unset, as "
        "often as this run was interrupted so far.",
        None,
        gt=0.0,
        le=1e6,
    )
    on_end: Command | None = key(
        "Command that rank 0 runs by `/bin/sh`, once, when the run has ended, in whatever way but being killed. "
        "`FINETUNE_OUTCOME`, `FINETUNE_REASON`, `FINETUNE_EXIT_CODE`, `FINETUNE_STEP`, `FINETUNE_RUN_FOLDER` and "
        "`FINETUNE_STATUS_FILE` describe the end. See docs/how-to/several-gpus.md.",
        None,
    )
    record_layers: bool = key(
        "Record norm and checksum of every layer's output in the first 3 steps, for `finetune verify replay --layers`.",
        False,
    )
    strategy: StrategyName | None = key(
        "Refuse to start under any other strategy. Unset: the strategy of the accelerate config.", None
    )
