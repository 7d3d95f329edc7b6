"""`run:` - name, output folder, seed and supervision of the run."""

from typing import Annotated, Literal

from pydantic import Field

from finetune.config.section import Path, Section, Seed, key

StrategyName = Literal["single", "ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3", "tp"]

Outcome = Literal["finished", "failed", "failed_start", "stopped", "interrupted", "idle"]
"""How a run ends on a machine; FINETUNE_OUTCOME of `run.on_end`."""

Command = Annotated[str, Field(max_length=10_000, pattern=r"^[^\x00]*[^\x00\s][^\x00]*$")]


class OnEndSection(Section):
    """A command that each machine runs when the run is over there, whatever has ended it."""

    command: Command = key(
        "Run by `/bin/sh` as the user of the run, once every process of the run on the machine is gone and all is "
        "written and uploaded. `FINETUNE_OUTCOME`, `FINETUNE_REASON`, `FINETUNE_EXIT_CODE`, `FINETUNE_STEP`, "
        "`FINETUNE_RUN_FOLDER` and `FINETUNE_STATUS_FILE` describe the end."
    )
    when: Annotated[tuple[Outcome, ...], Field(strict=False, min_length=1)] = key(
        "Outcomes after which it is run: `finished`; `failed`, also when killed; `failed_start`, before training; "
        "`stopped` by a signal, a spot notice or a limit; `interrupted` by Ctrl-C; `idle`, without progress for "
        "`idle_after_seconds`.",
        ("finished", "failed", "idle"),
    )
    where: Literal["each_host", "first_host"] = key(
        "`each_host`: every machine of the run; `first_host`: only the one with rank 0.", "each_host"
    )
    restart_seconds: float = key(
        "After any end but `finished`, wait this long for the run to be started again; if it is, the "
        "command is not run.",
        60.0,
        ge=0.0,
        le=7 * 24 * 3600.0,
    )
    idle_after_seconds: float = key(
        "A machine on which the run makes no progress for this long is `idle`: it hangs, is suspended, or its launcher "
        "waits. More than `run.hang_after_seconds`, whose report comes first.",
        3600.0,
        gt=0.0,
        le=30 * 24 * 3600.0,
    )
    timeout_seconds: float = key("Kill the command after this time.", 600.0, gt=0.0, le=24 * 3600.0)


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
    on_end: OnEndSection | Command | None = key(
        "Command that each machine runs when the run is over there: a text, such as `sudo shutdown -h now`, or a "
        "section. See docs/how-to/interruptions.md.",
        None,
    )
    strategy: StrategyName | None = key(
        "Refuse to start under any other strategy. Unset: the strategy of the accelerate config.", None
    )

    @property
    def on_end_section(self) -> OnEndSection | None:
        """Return `on_end` as a section, also where only the command is written."""
        return OnEndSection(command=self.on_end) if isinstance(self.on_end, str) else self.on_end
