"""What can ask a run to stop."""

import os
from collections.abc import Callable
from pathlib import Path

from finetune.config.run_config import RunConfig
from finetune.report.announcer import Announcer
from finetune.runtime import ranks
from finetune.runtime.signals import SignalNote
from finetune.runtime.spot import SpotNotice
from finetune.train.parts import Saving
from finetune.train.stopping import FAILED_SAVE, SPOT_NOTICE, STOP_FILE, TIME_LIMIT, StopFile, TimeLimit, Wishes


def make_wishes(config: RunConfig, *, note: SignalNote, save: Saving, started: float, say: Announcer) -> Wishes:
    """Return everything that can ask this rank to stop.

    Only rank 0 looks for the file `STOP` in the run's folder, and one process of a machine for its cloud's notice.
    """
    asked: dict[str, Callable[[], bool]] = {FAILED_SAVE: lambda: save.has_failed}
    if config.train.time_limit_minutes:
        asked[TIME_LIMIT] = TimeLimit(config.train.time_limit_minutes * 60, started)
    if ranks.is_main():
        asked[STOP_FILE] = StopFile(stop_file(Path(config.run.folder)))
    if config.run.spot_notice and os.environ.get("LOCAL_RANK", "0") == "0":
        asked[SPOT_NOTICE] = SpotNotice(config.run.spot_notice, say=say).start()
    return Wishes(note, asked)


def take_back_stop(folder: Path, *, say: Callable[[str], None]) -> None:
    """Remove what asked the run to stop, so that the same command continues; say where that cannot be done."""
    path = stop_file(folder)
    try:
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    except OSError as error:
        say(f"{path} cannot be removed ({error.strerror}): remove it, the next start would stop at once.")


def stop_file(folder: Path) -> Path:
    """Return where a user puts a file that asks the run to stop."""
    return folder / "STOP"
