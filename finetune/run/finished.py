"""Whether there is anything left to do: the same command on a finished run is a success that does nothing."""

from finetune.checkpoint.together import main_does
from finetune.config.run_config import RunConfig
from finetune.report.announcer import Announcer
from finetune.run.identity import facts_with
from finetune.run.lessons import Lessons
from finetune.run.over import FinishedRun, over_on_disk, told_over


def find_finished(
    config: RunConfig, lessons: Lessons, *, num_steps: int, strategy: str, say: Announcer
) -> FinishedRun | None:
    """Return the run if its last checkpoint is whole by size and `final/` is from it; else it is for `continue_run`.

    What is used of the checkpoint here is compared with its digest, too.

    Needs no model. Raises CheckpointError where the config is no longer the one it was trained with. Collective.
    """
    found = main_does(lambda: over_on_disk(config, num_steps=num_steps))
    if found is None:
        return None
    finished, manifest = found
    told = manifest.run.identity
    base, adapter, teacher = told.get("base weights"), told.get("first adapter"), told.get("teacher")
    wanted = facts_with(base, config, lessons, strategy=strategy, adapter=adapter, teacher=teacher)
    sentences = told_over(config, finished, manifest.run, wanted=wanted)
    for sentence in sentences or ():
        say(sentence)
    return finished if sentences is not None else None
