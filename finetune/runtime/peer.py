"""One process of a run, by the names that others know it by."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """One process of the run."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"
