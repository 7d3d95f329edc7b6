"""What earlier starts that were killed have left under temporary names goes when a run starts."""

from pathlib import Path

from finetune.config.run_config import RunConfig
from finetune.data.prepared.cache import cache_folder
from finetune.report.announcer import Announcer
from finetune.run.over import read_record
from finetune.runtime import digests, files
from finetune.runtime.leftovers import LOCKED_SECONDS, SHARED_SECONDS, clear_abandoned, temporary

_PROBE_BYTES = 256 << 10
"""About what a run writes before its first step."""


def clear_leftovers(config: RunConfig, *, say: Announcer) -> None:
    """Remove them from the run's folder, which this process holds, and where provably abandoned from the cache.

    Raises OSError where the folder takes nothing: a full disk is told before data is prepared and a model built.
    """
    run = Path(config.run.folder)
    cleared = clear_abandoned(run, seconds=LOCKED_SECONDS, below=True)
    for folder in {cache_folder(config.data), Path(digests.FOLDER).expanduser()}:
        cleared += clear_abandoned(folder, seconds=SHARED_SECONDS, below=True)
    if cleared:
        more = f" and {len(cleared) - 1} more" if len(cleared) > 1 else ""
        say(f"removed {cleared[0]}{more}: left by a process that was killed while it wrote")
    if read_record(run) is None:  # of a finished run there may be nothing left to write
        _try_to_write(run)


def _try_to_write(run: Path) -> None:
    probe = temporary(run / "probe")
    try:
        files.write_bytes(probe, bytes(_PROBE_BYTES))
    finally:
        probe.unlink(missing_ok=True)
