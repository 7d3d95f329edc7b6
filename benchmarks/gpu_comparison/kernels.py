"""What a profile says about a step: which kernels take the time, how long the device waits, and for whom the host does.

Read off the profiler's raw events: to build its tree of events takes longer than the steps.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.autograd import DeviceType

RANGE = "profiled steps"
NUM_TOP = 20
WAITS = frozenset(
    {"cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "hipDeviceSynchronize", "cudaMemcpy"}
)
"""Calls in which the host waits for the device; `cudaMemcpyAsync` does not, and where it must, one of these follows."""

GROUPS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern, re.IGNORECASE))
    for name, pattern in (
        ("communication", r"nccl|c10d::"),
        ("attention", r"flash|fmha|attention|attn"),
        ("matrix products", r"gemm|nvjet|cutlass|cublas|xmma|::mm$|::addmm|::bmm|::linear|splitk"),
        ("optimizer", r"adam|multi_tensor|foreach"),
        ("compiled", r"^triton_"),
        ("loss", r"softmax|nll_loss|cross_entropy"),
        ("copies and casts", r"memcpy|copy|::to$|_to_copy|cast|CatArray|::cat|::stack"),
        ("sums", r"reduce|norm|::sum|::mean"),
        ("fills", r"memset|fill|zero"),
        ("elementwise", r"elementwise|vectorized|unrolled|::mul|::add|::silu|::neg|::div|::rsqrt|::pow"),
    )
)


def read_profile(events: Iterable[Any], *, num_steps: int, is_on_device: bool) -> dict[str, Any]:
    """Return, per step, the time of kernels by group and by name; the device's idle share; waits of the host in all.

    On a CPU operators take the place of kernels, without what they call.
    """
    listed = list(events)
    profiled = next(each for each in listed if each.name() == RANGE and each.device_type() == DeviceType.CPU)
    host = [each for each in listed if each.device_type() == DeviceType.CPU and _is_within(each, profiled)]
    kernels = list(_kernels(listed, profiled) if is_on_device else _own_times(host))
    seconds: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for name, nanoseconds in kernels:
        seconds[name] += nanoseconds / 1e9 / num_steps
        counts[name] += 1
    waits = Counter(each.name() for each in host if each.name() in WAITS)
    ordered = sorted(seconds, key=lambda name: -seconds[name])
    return {
        "kernels_per_step": len(kernels) / num_steps,
        "busy_seconds": sum(seconds.values()),
        "idle_share": _idle_share(listed, profiled) if is_on_device else None,
        "groups": _by_group(seconds),
        "top": [[name[:120], seconds[name], counts[name] / num_steps] for name in ordered[:NUM_TOP]],
        "waits": dict(waits),
    }


def table(profile: Mapping[str, Any], *, num_rows: int = NUM_TOP) -> list[str]:
    """Return the profile as lines of Markdown."""
    whole = max(1e-12, profile["busy_seconds"])
    idle = "-" if profile["idle_share"] is None else f"{100 * profile['idle_share']:.1f}%"
    lines = [
        f"Kernels a step: {profile['kernels_per_step']:,.0f}; device busy {1000 * whole:.1f} ms a step; idle {idle}; "
        f"waits of the host: {profile['waits'] or 'none'}.",
        "",
        "| kernel | ms a step | share | calls a step |",
        "|---|---|---|---|",
    ]
    for name, seconds in profile["groups"].items():
        lines.append(f"| **{name}** | {1000 * seconds:.2f} | {100 * seconds / whole:.1f}% | |")
    for name, seconds, count in profile["top"][:num_rows]:
        shown = name.replace("|", "/")[:90]
        lines.append(f"| `{shown}` | {1000 * seconds:.2f} | {100 * seconds / whole:.1f}% | {count:g} |")
    return lines


def group_of(name: str) -> str:
    """Return the kind of work of a kernel or operator.

    >>> group_of("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT"), group_of("void at::native::elementwise_kernel<128, 2>")
    ('matrix products', 'elementwise')
    """
    return next((group for group, pattern in GROUPS if pattern.search(name)), "other")


def _is_within(event: Any, profiled: Any) -> bool:
    return bool(profiled.start_ns() <= event.start_ns() < profiled.start_ns() + profiled.duration_ns())


def _on_device(events: Sequence[Any], profiled: Any) -> Iterator[Any]:
    """Yield what ran on the device; a range that the host has named is shown there, too, and is no work."""
    named = {each.name() for each in events if each.is_user_annotation()} | {RANGE}
    for each in events:
        if each.device_type() != DeviceType.CPU and each.name() not in named and _starts_after(each, profiled):
            yield each


def _starts_after(event: Any, profiled: Any) -> bool:
    return bool(event.start_ns() >= profiled.start_ns())


def _kernels(events: Sequence[Any], profiled: Any) -> Iterator[tuple[str, int]]:
    for each in _on_device(events, profiled):
        yield each.name(), each.duration_ns()


def _idle_share(events: Sequence[Any], profiled: Any) -> float:
    """Return the share of the time between the first kernel and the end of the last in which none ran."""
    spans = sorted((each.start_ns(), each.start_ns() + each.duration_ns()) for each in _on_device(events, profiled))
    if not spans:
        return 1.0
    busy, reached = 0, spans[0][0]
    for start, end in spans:
        busy += max(0, end - max(start, reached))
        reached = max(reached, end)
    return 1.0 - busy / max(1, reached - spans[0][0])


def _own_times(host: Sequence[Any]) -> Iterator[tuple[str, int]]:
    """Yield every operator with its time without those that it calls; events of a thread are nested."""
    by_thread: defaultdict[int, list[Any]] = defaultdict(list)
    for each in host:
        if not each.is_user_annotation():
            by_thread[each.start_thread_id()].append(each)
    for events in by_thread.values():
        events.sort(key=lambda each: (each.start_ns(), -each.duration_ns()))
        stack: list[list[Any]] = []  # of [event, its own time]
        for each in events:
            while stack and stack[-1][0].start_ns() + stack[-1][0].duration_ns() <= each.start_ns():
                done, own = stack.pop()
                yield done.name(), own
            if stack:
                stack[-1][1] -= each.duration_ns()
            stack.append([each, each.duration_ns()])
        yield from ((done.name(), own) for done, own in stack)


def _by_group(seconds: Mapping[str, float]) -> dict[str, float]:
    groups: defaultdict[str, float] = defaultdict(float)
    for name, each in seconds.items():
        groups[group_of(name)] += each
    return dict(sorted(groups.items(), key=lambda item: -item[1]))
