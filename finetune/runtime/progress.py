"""How far a run has come: the few numbers that grow, in one object of plain types."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

VERSION = 3
_WITHOUT_CONTENTS = 2
"""The version before: its digest of samples is of their ids alone."""


@dataclass
class Progress:
    """What a run has done so far, counted over all ranks. The data position is `step` times the global batch."""

    step: int = 0  # optimizer steps behind us, skipped ones included
    num_tokens: int = 0  # padding not counted
    num_targets: int = 0
    num_scale_skips: int = 0  # fp16: steps left out because the loss scale was too high
    num_nonfinite_skips: int = 0
    seconds: float = 0.0  # of training, over all starts
    best_metric: float | None = None  # of early stopping
    evaluations_since_best: int = 0
    last_metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    metrics_step: int = 0  # when that was
    samples_sha256: str = ""  # rolled over the samples of every step
    knows_contents: bool = True  # that digest is of ids and contents; False: of ids alone, as it was once

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain types."""
        values = {name: value for name, value in asdict(self).items() if name != "knows_contents"}
        return {"version": VERSION if self.knows_contents else _WITHOUT_CONTENTS, **values}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "Progress":
        """Return the progress that `state_dict` described; raises ValueError for another version."""
        version = state.get("version")
        if version not in (VERSION, _WITHOUT_CONTENTS):
            raise ValueError(f"progress has version {version}; this program reads version {VERSION}")
        values = {name: value for name, value in state.items() if name != "version"}
        return cls(**values, knows_contents=version == VERSION)
