"""What a run says of itself to its checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RunFacts:
    """What a checkpoint remembers of the run that wrote it, in words fit for a message."""

    identity: Mapping[str, str]  # what changes the maths: a run that continues it must have the same
    settings: Mapping[str, str]  # the rest of the config: may differ, and is listed when it does
    origin: Mapping[str, str]  # `strategy` and `processes`: where it comes from, of no consequence
