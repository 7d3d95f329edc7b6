"""After the first step of a process, its reporter is told what it took to get there."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice

from finetune.data.batch import Batch
from finetune.report.events import StartedUp
from finetune.report.reporter import Reporter
from finetune.runtime.startup import StartUp
from finetune.train.parts import Parts

Groups = Callable[..., Iterator[tuple[Batch, ...]]]


def telling_start(parts: Parts, startup: StartUp) -> Parts:
    """Return the parts with groups that note when the first is asked for, and when the step after it is over.

    It is over when the second one is asked for: a run of one step does not tell.
    """
    return replace(parts, groups=partial(_groups, parts.groups, startup=startup, tell=parts.reporter))


def _groups(groups: Groups, *, startup: StartUp, tell: Reporter, first_step: int) -> Iterator[tuple[Batch, ...]]:
    startup.end("run folder")
    coming = groups(first_step=first_step)
    for group in islice(coming, 1):
        yield group
        startup.end("first step")
        tell(
            StartedUp(
                step=first_step + 1,
                seconds={phase.name: phase.seconds for phase in startup.phases},
                cpu_seconds={phase.name: phase.cpu_seconds for phase in startup.phases},
                memory_bytes={phase.name: phase.memory_bytes for phase in startup.phases},
            )
        )
    yield from coming
