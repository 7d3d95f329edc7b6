"""Sets that are damaged: what is said of them, and how they are put out of the way, never deleted."""

from collections.abc import Callable, Iterable
from pathlib import Path

from finetune.errors import DataError
from finetune.runtime.files import set_aside


class DamagedSet(DataError):
    """What was prepared and kept on disk is no longer what was written."""

    def __init__(self, folder: Path, reason: str, *, title: str = "the prepared set") -> None:
        self.folder = folder
        self.reason = reason
        super().__init__(f"{title} {folder} is damaged: {reason}")


def put_aside(folder: Path, is_damaged: Callable[[], bool], *, say: Callable[[str], None]) -> Path | None:
    """Rename the folder where it still is damaged and return its new name; None where another process has seen to it.

    Raises DataError where it cannot be renamed, as in a cache that is only read here.
    """
    try:
        return set_aside(folder, is_damaged, say=say)
    except OSError as error:
        raise DataError(
            f"{folder} is damaged and cannot be set aside: {error.strerror or error}. Set data.cache_folder to a "
            "folder that can be written, or have whoever owns this one delete the damaged set; it is made again."
        ) from error


def damaged_copies(folder: Path) -> list[Path]:
    """Return what has been set aside of this folder and not been deleted since."""
    prefix = f".damaged-{folder.name}-"
    return sorted(path for path in folder.parent.iterdir() if path.name.startswith(prefix))


def refusal(what: str, stores: Iterable[tuple[Path, Callable[[], bool]]]) -> tuple[str, ...]:
    """Return what is to be said of something damaged that was delivered from these folders.

    Each comes with what tells whether it still is damaged on the disk; where it is, it is set aside.
    """
    told = [seen for folder, is_damaged in stores if (seen := _seen_to(folder, is_damaged))]
    if told:
        return what, *told
    return (
        f"{what}, and on the disk it is intact: it was damaged in the memory of a process. The same command continues "
        "from the last checkpoint; if this happens again, test the memory of this machine.",
    )


def _seen_to(folder: Path, is_damaged: Callable[[], bool]) -> str | None:
    """Return what has become of a folder that is damaged, None of one that is not."""
    again = "The same command makes it again and continues from the last checkpoint."
    try:
        aside = put_aside(folder, is_damaged, say=_say_nothing)
    except DataError as error:
        return str(error)
    if aside is not None:
        return f"{folder} is set aside as {aside.name}. {again}"
    return None if folder.exists() else f"{folder} has been set aside by another process. {again}"


def _say_nothing(message: str) -> None:
    """Say nothing: the message of the refusal says all."""
