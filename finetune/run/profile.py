"""Steps that are profiled: each call of a component that belongs to a phase counts for it, and no component knows."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from finetune.config.sections.report import ProfileSection
from finetune.data.batch import Batch
from finetune.report.phases import BACKWARD, DATA, EVALUATE, FORWARD, LOG, OPTIMIZER, SAVE
from finetune.report.profile import StepProfile
from finetune.runtime.run_folder import PROFILE_FOLDER
from finetune.train.parts import TrainingComponents
from finetune.train.upstream import replace_engine_step, without_accelerate_wrapper


def profile_parts(parts: TrainingComponents, section: ProfileSection | None, *, run_folder: Path) -> TrainingComponents:
    """Return the parts, timed in the window that the section describes; they compute the same."""
    if section is None:
        return parts
    profile = StepProfile(
        section,
        folder=run_folder / PROFILE_FOLDER,
        reporter=parts.reporter,
        device=parts.accelerator.device,
    )
    profile.attach = partial(_timed_optimizer, parts)
    timed: Callable[..., Any] = partial(_Timed, profile=profile)

    def timed_groups(*, first_step: int) -> Iterator[tuple[Batch, ...]]:
        fetch = timed_call(partial(next, parts.groups(first_step=first_step), None), DATA, profile)
        while (group := fetch()) is not None:
            yield group

    return replace(
        parts,
        groups=timed_groups,
        task=timed(parts.task, phases={"prepare_step": FORWARD, "loss_sums": FORWARD}),
        before_batch=timed_call(parts.before_batch, FORWARD, profile),
        update=timed(parts.update, phases={"backward": BACKWARD, "clip": OPTIMIZER}, called=OPTIMIZER),
        meters=timed(parts.meters, phases={"read": LOG}),
        reporter=timed(parts.reporter, phases={}, called=LOG),
        evaluate=timed_call(parts.evaluate, EVALUATE, profile),
        save=timed(parts.save, phases={"report_written": SAVE, "wait_for_writes": SAVE}, called=SAVE),
        profile=profile,
    )


def timed_call(function: Callable[..., Any], phase: str, profile: StepProfile) -> Callable[..., Any]:
    """Return the function, whose time counts for the phase while the window of the profile is open."""

    def call(*given: Any, **named: Any) -> Any:
        if not profile.is_open:
            return function(*given, **named)
        with profile.phase(phase):
            return function(*given, **named)

    return call


class _Timed:
    """Stands for an object whose calls count for phases: the named methods, and calls of the object itself."""

    def __init__(
        self, inner: Any, *, profile: StepProfile, phases: Mapping[str, str], called: str | None = None
    ) -> None:
        self._inner = inner
        self._call = timed_call(inner, called, profile) if called else inner
        for name, phase in phases.items():
            setattr(self, name, timed_call(getattr(inner, name), phase, profile))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Call the object itself."""
        return self._call(*given, **named)


@contextmanager
def _timed_optimizer(parts: TrainingComponents, profile: StepProfile) -> Iterator[None]:
    """Have the optimizer's steps inside a backward pass count as such: DeepSpeed's engine's, and `in_backward`."""
    with ExitStack() as stack:
        if hasattr(parts.model, "zero_optimization_stage"):
            engine: Any = parts.model
            stack.enter_context(replace_engine_step(engine, timed_call(engine.step, OPTIMIZER, profile)))
        elif isinstance(optimizer := without_accelerate_wrapper(parts.optimizer), torch.optim.Optimizer):
            running = ExitStack()
            before = optimizer.register_step_pre_hook(lambda *_: running.enter_context(profile.phase(OPTIMIZER)))
            after = optimizer.register_step_post_hook(lambda *_: running.close())
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield
