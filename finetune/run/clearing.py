"""What earlier starts that were killed have left under temporary names goes when a run starts."""

from pathlib import Path

from finetune.config.run_config import RunConfig
from finetune.data.prepared.cache import cache_folder
from finetune.report.announcer import Announcer
from finetune.runtime import digests
from finetune.runtime.leftovers import LOCKED_SECONDS, SHARED_SECONDS, clear_abandoned


def clear_leftovers(config: RunConfig, *, say: Announcer) -> None:
    """Remove them from the run's folder, which this process holds, and where provably abandoned from the cache."""
    run = Path(config.run.folder)
    cleared = clear_abandoned(run, seconds=LOCKED_SECONDS, below=True)
    for folder in {cache_folder(config.data), Path(digests.FOLDER).expanduser()}:
        cleared += clear_abandoned(folder, seconds=SHARED_SECONDS, below=True)
    if cleared:
        more = f" and {len(cleared) - 1} more" if len(cleared) > 1 else ""
        say(f"removed {cleared[0]}{more}: left by a process that was killed while it wrote")
