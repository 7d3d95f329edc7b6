"""Whether there is anything left to do: the same command on a finished run is a success that does nothing."""

from dataclasses import dataclass
from pathlib import Path

from finetune.checkpoint import layout
from finetune.checkpoint.changes import told_changes
from finetune.checkpoint.find import read_named
from finetune.checkpoint.manifest import Manifest, OtherFormatError, first_problem
from finetune.checkpoint.texts import read_texts
from finetune.checkpoint.together import main_does
from finetune.config.run_config import RunConfig
from finetune.errors import CheckpointError
from finetune.report.announcer import Announcer
from finetune.run.continuing import BEST_IS_OF
from finetune.run.final import FOLDER, is_exported
from finetune.run.identity import facts_with
from finetune.run.lessons import Lessons
from finetune.runtime.progress import Progress
from finetune.train.loop import EARLY, FINISHED
from finetune.train.stopping import EarlyStopping


@dataclass(frozen=True)
class FinishedRun:
    """A run that needs nothing more."""

    checkpoint: Path
    progress: Progress
    reason: str


def find_finished(
    config: RunConfig, lessons: Lessons, *, num_steps: int, strategy: str, say: Announcer
) -> FinishedRun | None:
    """Return the run if its last checkpoint is whole by size and `final/` is from it; else it is for `continue_run`.

    What is used of the checkpoint here is compared with its digest, too.

    Needs no model. Raises CheckpointError where the config is no longer the one it was trained with. Collective.
    """
    found = main_does(lambda: _find(config, num_steps=num_steps))
    if found is None:
        return None
    finished, manifest = found
    told = manifest.run.identity
    base, adapter, teacher = told.get("base weights"), told.get("first adapter"), told.get("teacher")
    wanted = facts_with(base, config, lessons, strategy=strategy, adapter=adapter, teacher=teacher)
    if finished.reason == EARLY and any(
        wanted.settings.get(key) != manifest.run.settings.get(key) for key in BEST_IS_OF
    ):
        return None
    allowed = config.checkpoint.allow_changes
    for sentence in told_changes(finished.checkpoint, manifest.run, wanted=wanted, allowed=allowed):
        say(sentence)
    final = Path(config.run.folder) / FOLDER
    say(f"nothing to do: {finished.reason} at step {finished.progress.step}, and the model is in {final}")
    return finished


def _find(config: RunConfig, *, num_steps: int) -> tuple[FinishedRun, Manifest] | None:
    if config.checkpoint.resume != "auto":
        return None
    folder = Path(config.run.folder)
    path = next(reversed(layout.steps(folder / layout.CHECKPOINTS).values()), None)
    try:
        if path is None or not _is_whole(path, manifest := read_named(path)):
            return None
        progress = Progress.from_state_dict(read_texts(path, manifest).progress)
    except OtherFormatError:  # said before a model is built
        raise
    except (CheckpointError, OSError):  # whatever it is, `continue_run` meets it too, and sets aside or refuses
        return None
    reason = _over_because(config, progress, num_steps=num_steps)
    if reason is None or not is_exported(folder, step=progress.step, section=config.export):
        return None
    return FinishedRun(path, progress, reason), manifest


def _is_whole(path: Path, manifest: Manifest) -> bool:
    """Tell whether all files are there with their sizes; those that are no tensors also with their digests."""
    if any((path / name).stat().st_size != facts.size_bytes for name, facts in manifest.files.items()):
        return False
    return first_problem(path, manifest.files, manifest.files.keys() & layout.TEXTS) is None


def _over_because(config: RunConfig, progress: Progress, *, num_steps: int) -> str | None:
    section = config.train.early_stopping
    if section is not None and EarlyStopping(section).is_over(progress):
        return EARLY
    return FINISHED if progress.step >= num_steps else None
