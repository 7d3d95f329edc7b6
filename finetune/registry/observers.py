"""What plugins add to watch a run: the reporters of `report.reporters` and the callbacks of `train.callbacks`."""

from dataclasses import dataclass
from enum import Flag, auto

from finetune.registry.table import Entry, Table


class Request(Flag):
    """What a callback may ask for. Ranks agree before the next step: what one of them asks for, all of them do."""

    EVALUATE = auto()  # on the validation rows, now
    SAVE = auto()  # a checkpoint, now
    STOP = auto()  # with a checkpoint; the same command resumes


NO_REQUEST = Request(0)


@dataclass(frozen=True, kw_only=True)
class ReporterEntry(Entry):
    """A reporter. Its implementation is called with the run folder, a path, and returns a `report.reporter.Reporter`.

    It exists on rank 0 alone.
    """


REPORTERS: Table[ReporterEntry] = Table("reporter", ReporterEntry)


@dataclass(frozen=True, kw_only=True)
class CallbackEntry(Entry):
    """A callback. Its implementation is called without arguments, on every rank, and returns the callback.

    That is a function from an event (`report.events`) to a Request or None.
    """


CALLBACKS: Table[CallbackEntry] = Table("callback", CallbackEntry)
