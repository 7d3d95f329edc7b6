"""What a profile says about a step: which kernels take the time, how long the device is idle, and where the host waits.

Read off the profiler's raw events: to build its tree of events takes longer than the steps.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.autograd import DeviceType

RANGE = "profiled steps"
NUM_TOP = 20
WAITS = frozenset(
    {"cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "hipDeviceSynchronize", "cudaMemcpy"}
)
"""Calls in which the host waits for the device; `cudaMemcpyAsync` does not, and where it must, one of these follows."""


def read_profile(events: Iterable[Any], *, num_steps: int) -> dict[str, Any]:
    """Return the time of the device's kernels per step by name, its idle share, and the waits of the host.

    Without a device there are no kernels.
    """
    listed = list(events)
    profiled = next(each for each in listed if each.name() == RANGE and each.device_type() == DeviceType.CPU)
    started, ended = profiled.start_ns(), profiled.start_ns() + profiled.duration_ns()
    named = {each.name() for each in listed if each.is_user_annotation()} | {RANGE}  # shown on the device, too
    kernels = [
        each
        for each in listed
        if each.device_type() != DeviceType.CPU and each.name() not in named and each.start_ns() >= started
    ]
    seconds: Counter[str] = Counter()
    for each in kernels:
        seconds[each.name()] += each.duration_ns() / 1e9 / num_steps  # type: ignore[assignment]
    counts = Counter(each.name() for each in kernels)
    waits = Counter(each.name() for each in listed if each.name() in WAITS and started <= each.start_ns() < ended)
    return {
        "kernels_per_step": len(kernels) / num_steps,
        "busy_seconds": sum(seconds.values()),
        "idle_share": _idle_share(kernels),
        "top": [[name[:120], size, counts[name] / num_steps] for name, size in seconds.most_common(NUM_TOP)],
        "waits": dict(waits),
    }


def table(profile: Mapping[str, Any]) -> list[str]:
    """Return the profile as lines of Markdown."""
    whole = max(1e-12, profile["busy_seconds"])
    lines = [
        f"Kernels a step: {profile['kernels_per_step']:,.0f}; device busy {1000 * whole:.1f} ms a step; "
        f"idle {100 * profile['idle_share']:.1f}%; waits of the host: {profile['waits'] or 'none'}.",
        "",
        "| kernel | ms a step | share | calls a step |",
        "|---|---|---|---|",
    ]
    for name, seconds, count in profile["top"]:
        shown = name.replace("|", "/")[:90]
        lines.append(f"| `{shown}` | {1000 * seconds:.2f} | {100 * seconds / whole:.1f}% | {count:g} |")
    return lines


def _idle_share(kernels: Sequence[Any]) -> float:
    """Return the share of the time between the first kernel and the end of the last in which none ran."""
    spans = sorted((each.start_ns(), each.start_ns() + each.duration_ns()) for each in kernels)
    if not spans:
        return 1.0
    busy, reached = 0, spans[0][0]
    for start, end in spans:
        busy += max(0, end - max(start, reached))
        reached = max(reached, end)
    return 1.0 - busy / max(1, reached - spans[0][0])
