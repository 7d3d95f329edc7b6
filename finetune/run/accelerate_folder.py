"""What Accelerate's `save_state` leaves in a folder under each strategy, and whether that can be read back."""

from pathlib import Path

from finetune.errors import CheckpointError
from finetune.strategy.protocol import Strategy

MODEL = "pytorch_model"


def require_folder(folder: Path, *, strategy: Strategy, world: int) -> None:
    """Raise CheckpointError unless the folder holds what this strategy's `load_state` reads, of as many processes.

    DeepSpeed itself goes on with a warning where its files are missing.
    """
    if not folder.is_dir():
        raise CheckpointError(f"--from {folder}: there is no such folder.")
    expected = strategy.expected()
    if expected.zero_stage is not None:
        missing = _missing_zero(folder, world=world)
    elif expected.fsdp_version is not None:
        missing = _missing_fsdp(folder)
    else:
        missing = _missing_plain(folder)
    if missing is not None:
        there = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise CheckpointError(
            f"--from {folder}: {missing}, so it was not written under {strategy.name} with {world} "
            f"process{'' if world == 1 else 'es'}. It holds: {there}. Launch the strategy that wrote it."
        )


def _missing_plain(folder: Path) -> str | None:
    if not (folder / "optimizer.bin").is_file():
        return "has no optimizer.bin"
    has_model = any((folder / name).is_file() for name in ("model.safetensors", f"{MODEL}.bin"))
    return None if has_model else "has no model.safetensors"


def _missing_fsdp(folder: Path) -> str | None:
    is_sharded = (folder / f"{MODEL}_fsdp_0").is_dir() and (folder / "optimizer_0").is_dir()
    is_full = (folder / f"{MODEL}_fsdp.bin").is_file() and (folder / "optimizer.bin").is_file()
    return None if is_sharded or is_full else f"has neither {MODEL}_fsdp_0/ and optimizer_0/ nor their .bin files"


def _missing_zero(folder: Path, *, world: int) -> str | None:
    count = len(list((folder / MODEL).glob("*zero_pp_rank_*_optim_states.pt")))
    return None if count == world else f"has the optimizer state of {count} ZeRO processes"
