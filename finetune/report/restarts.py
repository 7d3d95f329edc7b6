"""The cost of restarts, from the events of a run: the reason, repeated steps, time and money."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KILLED = "killed"
FIRST_STEP = "first step"
"""The last phase of a start."""

PLANNED = frozenset(
    {"finished", "early stopping", "time limit", "STOP file", "stop_after_steps", "signal SIGINT", "interrupted"}
)
"""Reasons of intended ends, which are not interruptions."""


@dataclass
class Restart:
    """A start after the first. While no process ran, time was lost but no device was paid for."""

    reason: str  # why the previous start ended
    last_step: int  # the highest step taken before
    began: float  # unix seconds at which its process started; until its first step ends, at which training started
    ended: float  # unix seconds of the last event of the previous start
    num_devices: int
    startup_seconds: float = 0.0
    steps_redone: int = 0
    redone_seconds: float = 0.0

    @property
    def down_seconds(self) -> float:
        """Return the time in which no process of the run existed."""
        return max(0.0, self.began - self.ended)

    @property
    def device_hours(self) -> float:
        """Return the time of start-up and repeated steps on all devices."""
        return (self.startup_seconds + self.redone_seconds) * self.num_devices / 3600


@dataclass(frozen=True)
class RestartTotals:
    """The sums over all restarts; without a price `usd` is None."""

    restarts: int
    interruptions: int
    steps_redone: int
    down_seconds: float
    startup_seconds: float
    redone_seconds: float
    usd: float | None

    @property
    def lost_seconds(self) -> float:
        """Return the total lost time."""
        return self.down_seconds + self.startup_seconds + self.redone_seconds


@dataclass
class RestartHistory:
    """Reads events in the order in which they were written."""

    listed: list[Restart] = field(default_factory=list)
    usd_per_device_hour: float | None = None  # as of the last start
    price_source: str = ""
    _starts: int = 0
    _highest_step: int = 0
    _last_seen: float = 0.0  # time of the last event
    _reason: str | None = None  # why the current start ended

    def start(self, event: Mapping[str, Any], *, num_devices: int) -> None:
        """Add a start of the run."""
        self._starts += 1
        step, time = int(event["step"]), _finite(event.get("time"))
        if self._starts > 1:
            previous = event.get("previous") or {}
            seen, top = previous.get("time"), previous.get("step")
            if isinstance(seen, int | float) and seen <= time:
                self._record_time(float(seen))
            if isinstance(top, int) and top <= int(event.get("num_steps") or 0):
                self._highest_step = max(self._highest_step, top)  # the status is written more often than events
            price = event.get("device_price") or {}
            usd = price.get("usd_per_hour")
            self.usd_per_device_hour = float(usd) if isinstance(usd, int | float) else None
            self.price_source = str(price.get("source") or self.price_source)
            self.listed.append(
                Restart(
                    reason=self._reason or str(previous.get("reason") or KILLED),
                    last_step=self._highest_step,
                    began=time,
                    ended=min(self._last_seen, time),
                    num_devices=num_devices,
                )
            )
        self._highest_step, self._reason = max(self._highest_step, step), None
        self._record_time(time)

    def started_up(self, event: Mapping[str, Any]) -> None:
        """Add the duration of the start-up; the event follows the first step, which does not count as start-up."""
        self._record_time(_finite(event.get("time")))
        if self.listed:
            seconds = {name: _finite(value) for name, value in (event.get("seconds") or {}).items()}
            restart = self.listed[-1]
            restart.startup_seconds = sum(seconds.values()) - seconds.get(FIRST_STEP, 0.0)
            restart.began = _finite(event.get("time")) - sum(seconds.values())

    def step_taken(self, event: Mapping[str, Any]) -> None:
        """Add a step."""
        if self.listed and event["step"] <= self.listed[-1].last_step:
            self.listed[-1].steps_redone += 1
            self.listed[-1].redone_seconds += _finite(event.get("seconds"))
        self._highest_step = max(self._highest_step, event["step"])
        self._record_time(_finite(event.get("time")))

    def end(self, event: Mapping[str, Any]) -> None:
        """Add the end of the current start."""
        self._reason = str(event.get("reason"))
        self._record_time(_finite(event.get("time")))

    def totals(self) -> RestartTotals:
        """Return the sums."""
        price = self.usd_per_device_hour
        return RestartTotals(
            restarts=len(self.listed),
            interruptions=sum(restart.reason not in PLANNED for restart in self.listed),
            steps_redone=sum(restart.steps_redone for restart in self.listed),
            down_seconds=sum(restart.down_seconds for restart in self.listed),
            startup_seconds=sum(restart.startup_seconds for restart in self.listed),
            redone_seconds=sum(restart.redone_seconds for restart in self.listed),
            usd=None if price is None else price * sum(restart.device_hours for restart in self.listed),
        )

    def _record_time(self, time: float) -> None:
        self._last_seen = max(self._last_seen, time)


def _finite(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
