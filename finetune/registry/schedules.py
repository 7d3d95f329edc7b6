"""The shapes of the learning rate that `train.schedule.name` chooses from."""

from dataclasses import dataclass

from finetune.registry.table import Entry, Table


@dataclass(frozen=True, kw_only=True)
class ScheduleEntry(Entry):
    """A shape. Its implementation is a function from a `Schedule` and the steps done to a factor, 1 at the peak."""

    decays: bool = True  # to `final_fraction`
    has_decay_phase: bool = False  # of its own, `decay_fraction` of the run


SCHEDULES = Table(
    "schedule",
    ScheduleEntry,
    (
        ScheduleEntry(
            name="constant",
            description="no decay",
            implementation="finetune.train.optim.schedule:constant",
            decays=False,
        ),
        ScheduleEntry(
            name="linear",
            description="a straight line to the end",
            implementation="finetune.train.optim.schedule:linear",
        ),
        ScheduleEntry(
            name="cosine",
            description="half a cosine to the end (Loshchilov & Hutter, 2016, arXiv:1608.03983)",
            implementation="finetune.train.optim.schedule:cosine",
        ),
        ScheduleEntry(
            name="warmup_stable_decay",
            description="constant, then a straight line over `decay_fraction` (Hu et al., 2024, arXiv:2404.06395)",
            implementation="finetune.train.optim.schedule:warmup_stable_decay",
            has_decay_phase=True,
        ),
    ),
)
