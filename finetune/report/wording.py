"""How events and numbers read in the console: plain sentences and aligned numbers, no colour, no state."""

from collections.abc import Mapping
from functools import singledispatch
from typing import Any

from finetune.report.events import (
    Answered,
    CheckpointSaved,
    Evaluated,
    Event,
    Noted,
    RunEnded,
    RunStarted,
    StartedUp,
    StepSkipped,
    StepTaken,
    Warned,
)
from finetune.report.throughput import ThroughputMeter
from finetune.runtime.amounts import size_text

SLOW_DATA = 0.1
"""Share of the time spent waiting for batches from which on it is shown."""


@singledispatch
def lines(event: Event) -> tuple[str, ...]:
    """Return the lines that say what happened; none for events that the console does not tell."""
    return ()


@lines.register
def _(event: RunStarted) -> tuple[str, ...]:
    return (f"strategy {event.strategy}", *event.arithmetic)


@lines.register
def _(event: StartedUp) -> tuple[str, ...]:
    phases = " + ".join(f"{name} {seconds:.1f}" for name, seconds in event.seconds.items())
    return (f"start: {sum(event.seconds.values()):.1f} s = {phases}",)


@lines.register
def _(event: StepSkipped) -> tuple[str, ...]:
    samples = f"; samples {', '.join(map(str, event.sample_ids))} ({event.rows})" if event.sample_ids else ""
    return (f"step {event.step} skipped: {event.reason}{samples}",)


@lines.register
def _(event: Evaluated) -> tuple[str, ...]:
    found = f"evaluated at step {event.step}  {metric_line(event.metrics)}"
    return (f"{found}  ({event.num_rows:,} rows, {event.seconds:.1f} s)",)


@lines.register
def _(event: Answered) -> tuple[str, ...]:
    return (f"  prompt    {event.prompt!r}", f"  answer    {event.answer!r}", f"  reference {event.reference!r}")


@lines.register
def _(event: CheckpointSaved) -> tuple[str, ...]:
    times = f"{event.seconds:.1f} s, training waited {event.stall_seconds:.1f} s"
    return (f"checkpoint {event.path}  ({size_text(event.size_bytes)}, {times})",)


@lines.register
def _(event: Noted) -> tuple[str, ...]:
    return (event.message,)


@lines.register
def _(event: Warned) -> tuple[str, ...]:
    return (f"warning: {event.message}",)


@lines.register
def _(event: RunEnded) -> tuple[str, ...]:
    told = [f"{event.reason} at step {event.step} after {duration(event.seconds)}"]
    if event.final_folder is not None:
        told.append(f"model in {event.final_folder}")
        if event.talks:
            told.append(f"talk to it: finetune chat {event.final_folder}")
    return tuple(told)


def unit_of(config: Mapping[str, Any]) -> str:
    """Return what the samples of a job are counted in."""
    return "images" if config.get("task", {}).get("name") == "image_classification" else "tokens"


def step_line(event: StepTaken, *, num_steps: int, meter: ThroughputMeter) -> str:
    """Return `step  20/120  loss 2.3107  lr 9.8e-04 ...`, aligned under the lines before it."""
    return f"step {event.step:>{len(str(num_steps))}}/{num_steps}  {step_facts(event, meter=meter)}"


def step_facts(event: StepTaken, *, meter: ThroughputMeter) -> str:
    """Return the numbers of a step; the share of waiting since the last log point where it is worth a look."""
    facts = [
        f"loss {event.loss:.4f}",
        *([metric_line(event.metrics)] if event.metrics else []),
        f"lr {event.learning_rate:.1e}",
        f"grad {event.gradient_norm:.2f}",
        f"{meter.tokens_per_second:>7,.0f} {meter.unit}/s",
        f"eta {duration(meter.seconds_left)}",
        f"mem {size_text(event.memory_bytes)}",
    ]
    if meter.data_share >= SLOW_DATA:
        facts.append(f"waiting for data {meter.data_share:.0%}")
    return "  ".join(facts)


def metric_line(metrics: Mapping[str, float]) -> str:
    """Return metrics as `exact_match 1.0000  loss 0.0213`, by name."""
    return "  ".join(f"{name} {value:.4f}" for name, value in sorted(metrics.items()))


def change_line(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Return metrics as `exact_match 0.0000 -> 1.0000`; those without a value before stand alone."""
    return "  ".join(
        f"{name} {before[name]:.4f} -> {value:.4f}" if name in before else f"{name} {value:.4f}"
        for name, value in sorted(after.items())
    )


def duration(seconds: float | None) -> str:
    """Return hours, minutes and seconds (`0:01:12`); `-:--:--` when unknown."""
    if seconds is None:
        return "-:--:--"
    minutes, rest = divmod(max(round(seconds), 0), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
