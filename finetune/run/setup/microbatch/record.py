"""The microbatch size that `auto` came to, remembered in the run folder for the starts that resume the run."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from finetune.config.run_config import RunConfig
from finetune.runtime.files import atomic
from finetune.runtime.files.read import read_regular

MICROBATCH_FILE = "microbatch.json"


class MicrobatchRecord(BaseModel):
    """A size that fitted, and what its memory depends on."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    version: int = 1
    microbatch_size: int
    strategy: str
    processes: int
    sequence_size: int = 1  # processes that share each row
    peaks: dict[str, int]  # by kind of memory, of the rank that took the most
    settings: dict[str, str]


def memory_settings(config: RunConfig) -> Mapping[str, str]:
    """Return the settings that a resume may change and on which the memory of a microbatch depends."""
    model, train = config.model, config.train
    values = {
        "model.gradient_checkpointing": model.gradient_checkpointing,
        "model.activation_offload": model.activation_offload,
        "model.attention": model.attention,
        "train.loss_kernel": train.loss_kernel,
        "train.optimizer.in_backward": train.optimizer.in_backward,
        "data.batching.padding_free": config.data.batching.padding_free,
    }
    return {name: str(value) for name, value in values.items()}


def read_record(folder: Path) -> MicrobatchRecord | None:
    """Return what the run folder remembers; None where there is nothing, or nothing that can be read."""
    try:
        return MicrobatchRecord.model_validate_json(read_regular(folder / MICROBATCH_FILE))
    except (OSError, ValueError, ValidationError):
        return None


def write_record(folder: Path, record: MicrobatchRecord) -> None:
    """Write it; on one process."""
    atomic.write_json(folder / MICROBATCH_FILE, record.model_dump())
