"""`finetune verify replay`: the steps of a recorded run, taken again in the present environment, are still the same."""

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from finetune.checkpoint.format import layout
from finetune.checkpoint.read.changes import setting_differences
from finetune.checkpoint.read.inventory import locate_run, read_entry, select_checkpoint
from finetune.commands.source import with_trust
from finetune.commands.verify.runs import relative_difference
from finetune.config.load import load_resolved
from finetune.config.run_config import RunConfig
from finetune.errors import UserError
from finetune.report.history import EVENTS_FILE, read_events
from finetune.run.replay import ReplayedSteps, active_dropout, replay_steps, replayed_job
from finetune.run.setup.build import RestoredRun
from finetune.runtime import distributed
from finetune.runtime.environment import package_versions
from finetune.runtime.files.read import read_json
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER
from finetune.train.layer_outputs import NORMS

EventFields = Mapping[str, Any]


class ReplayTolerance(NamedTuple):
    """The largest relative differences that rounding explains; below a loss of 1 its difference is absolute."""

    loss: float
    gradient_norm: float
    layer_norm: float


TOLERANCES: Mapping[str, ReplayTolerance] = {
    "fp32": ReplayTolerance(1e-5, 1e-4, 1e-5),
    "tf32": ReplayTolerance(1e-3, 2e-2, 2e-3),
    "fp16": ReplayTolerance(1e-3, 2e-2, 2e-3),
    "bf16": ReplayTolerance(5e-3, 1e-1, 1e-2),
}
"""By what matrices are multiplied in: several times what other microbatches, layouts, worlds and strategies changed.

- fp32: sums in another order changed losses by at most 3e-6, outputs by 2e-7, gradient norms, in which positive and
  negative terms cancel, by 2e-6.
- bf16 has 8 bits: losses changed by at most 3e-3, outputs by 5e-3, gradient norms by 6e-2 in six steps at a high rate.
- tf32 and fp16 have 11 bits, an eighth of bf16's error (not measured). fp8 is compared as bf16, in which it sums.
"""


@dataclass(frozen=True)
class RecordedSteps:
    """What a run folder says about these steps, their start, and the environment of its last start."""

    started: EventFields
    steps: Mapping[int, EventFields]
    environment: Mapping[str, Any]

    @property
    def division(self) -> str:
        """Return how a step was divided into processes and microbatches."""
        return _division(self.started.get("arithmetic") or ())


def run_replay(
    run: Path,
    *,
    num_steps: int,
    start: int | None,
    layers: bool,
    overrides: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> int:
    """Take the steps again, print the comparison and return the exit code: 1 where something differs. Collective.

    The steps follow the checkpoint of step `start`, or are the run's first ones. Raises UserError if the run has no
    record of these steps, or if dropout would draw other masks here than in the run.
    """
    run = run.expanduser().absolute()
    checkpoint = None if start is None else select_checkpoint(locate_run(run), step=start)
    recorded = read_recorded(run, after=start or 0, num_steps=num_steps)
    last = max(recorded.steps)
    if layers and not any(step.get("layers") for step in recorded.steps.values()):
        raise UserError(
            f"--layers: {run / EVENTS_FILE} has no layer outputs of steps {min(recorded.steps)} to {last}. A run with "
            "`run.record_layers: true` records those of the first 3 steps of each start."
        )
    loaded = with_trust(load_resolved(run, overrides), trust_remote_code=trust_remote_code)
    with tempfile.TemporaryDirectory(prefix="finetune-replay-") as scratch:
        job = replayed_job(loaded, folder=Path(scratch), checkpoint=checkpoint, records_layers=layers)
        replayed = replay_steps(job, last_step=last, check=lambda restored: _require_same_masks(recorded, restored))
    tolerance = tolerance_of(job.config)
    code = distributed.run_on_rank_0(lambda: _judge(run, recorded, replayed, tolerance=tolerance))
    return distributed.shut_down(code)


def read_recorded(run: Path, *, after: int, num_steps: int) -> RecordedSteps:
    """Return the steps after this one from the run's events, a repeated step as it was last; raises UserError."""
    path = run / EVENTS_FILE
    if not path.is_file():
        raise UserError(f"{path} does not exist. Give the folder of a run, such as runs/first.")
    last_start: EventFields = {}
    started: EventFields = {}
    steps = {}
    for event in read_events(path):
        if event["event"] == "RunStarted":
            last_start = event
        elif event["event"] == "StepTaken" and after < event["step"] <= after + num_steps:
            steps[event["step"]] = event
            started = last_start if event["step"] == after + 1 else started
    if after + 1 not in steps:
        raise UserError(f"{path}: has no step {after + 1}, so there is nothing to compare.")
    try:
        environment = read_json(run / "environment.json")
    except (OSError, ValueError):
        environment = None
    return RecordedSteps(started, steps, environment if isinstance(environment, dict) else {})


def tolerance_of(config: RunConfig) -> ReplayTolerance:
    """Return the tolerance of the job's coarsest arithmetic."""
    used = {config.train.precision, config.model.dtype}
    if used & {"bf16", "fp8", "bfloat16"}:
        return TOLERANCES["bf16"]
    if used & {"fp16", "float16"}:
        return TOLERANCES["fp16"]
    return TOLERANCES["tf32" if torch.cuda.is_available() and config.train.tf32 is not False else "fp32"]


def _require_same_masks(recorded: RecordedSteps, restored: RestoredRun) -> None:
    """Raise UserError where dropout is on, and its masks are others than the recorded ones."""
    here, there = _division(restored.built.plan.arithmetic), recorded.division
    device = restored.built.prepared.accelerator.device.type
    recorded_on = next((each.get("type") for each in recorded.environment.get("devices", ())), device)
    places = active_dropout(restored)
    if places and (here, device) != (there, recorded_on):
        raise UserError(
            f"replay: dropout is on ({len(places)} places, such as {places[0]}), and its masks depend on processes, "
            f"microbatch and device. Recorded: {there}, on {recorded_on}; here: {here}, on {device}. Replay with the "
            "recorded numbers (`accelerate launch --num_processes N`, `--set train.microbatch_size=N`)."
        )


def _division(arithmetic: Sequence[str]) -> str:
    return next(iter(arithmetic), "").partition(" (")[0]


def _judge(run: Path, recorded: RecordedSteps, replayed: ReplayedSteps, *, tolerance: ReplayTolerance) -> int:
    """Print the steps of both and the first difference with what may explain it; return the exit code."""
    started = replayed.started
    print(f"recorded: {recorded.started.get('strategy', 'unknown')}; now: {started.strategy}")
    print("step        loss         now  difference  gradient norm         now  difference")
    groups = recorded.started.get("parameter_groups") or started.parameter_groups  # of older runs, unknown
    differences = list(group_differences(groups, started.parameter_groups))
    for number, there in recorded.steps.items():
        here = asdict(replayed.steps[number]) if number in replayed.steps else {}
        if here:
            columns = [f"{number:>4}"]
            for name, width in (("loss", 10), ("gradient_norm", 13)):
                pair = float(there[name]), float(here[name])
                columns.append(f"{pair[0]:>{width}.6f}  {pair[1]:>10.6f}  {relative_difference(*pair):>10.1e}")
            print("  ".join(columns))
        if not differences:
            differences = [f"step {number}: {line}" for line in step_differences(there, here, tolerance)]
    is_same_division = recorded.division == _division(started.arithmetic)
    notes = [*_layer_notes(recorded, replayed, is_same_division=is_same_division), *_changes(run, recorded, replayed)]
    verdict = (
        f"equal: {len(recorded.steps)} steps, samples and learning rates exactly, losses within {tolerance.loss:g}, "
        f"gradient norms within {tolerance.gradient_norm:g}"
    )
    print("\n  ".join(["differs" if differences else verdict, *differences, *notes]))
    return int(bool(differences))


def group_differences(recorded: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each change of settings of parameters, with the names of all that it concerns."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, pair in setting_differences(recorded, now).items():
        there, here = (re.split(r" with |, (?![^(]*\))", settings) for settings in pair)
        change = ", ".join(x for x in there if x not in here), ", ".join(x for x in here if x not in there)
        names.setdefault(change, []).append(name)
    for (was, is_now), changed in names.items():
        yield f"before the first step: parameter groups: {was} in the record, {is_now} now: {', '.join(changed)}"


def step_differences(recorded: EventFields, now: EventFields, tolerance: ReplayTolerance) -> Iterator[str]:
    """Yield what differs between a recorded step and the same one now, and the first layer that does.

    Of other samples, only that they are others; `now` is empty for a step that is not taken any more.
    """
    if not now or recorded["samples_sha256"] != now["samples_sha256"]:
        counts = (f"{recorded[name]:,} {name[4:]} in the record, {now.get(name, 0):,} now" for name in _COUNTS)
        yield f"other samples ({', '.join(counts)})"
        return
    limits = {"learning_rate": 1e-12, "loss": tolerance.loss, "gradient_norm": tolerance.gradient_norm}
    for name, limit in limits.items():
        yield from _difference(name, recorded[name], now[name], limit=limit, floor=float(name == "loss"))
    yield from list(layer_differences(recorded.get("layers") or {}, now["layers"], tolerance))[:1]


_COUNTS = ("num_tokens", "num_targets")


def layer_differences(recorded: EventFields, now: EventFields, tolerance: ReplayTolerance) -> Iterator[str]:
    """Yield each module whose output has another norm, in the order of the model; not where padding is counted."""
    for name in recorded if now else ():
        there, here = recorded[name], now.get(name)
        if here is None:
            yield f"output of {name}: recorded, and the model has no such module now"
        elif there["positions"] == here["positions"]:
            limit = tolerance.layer_norm
            texts = (text for norm in NORMS for text in _difference(norm, there[norm], here[norm], limit=limit))
            if (text := next(texts, None)) is not None:
                yield f"output of {name}: {text}"


def _difference(name: str, recorded: Any, now: Any, *, limit: float, floor: float = 0.0) -> Iterator[str]:
    """Yield the difference if it is above the limit; events have infinite numbers as strings."""
    there, here = float(recorded), float(now)
    if not (size := relative_difference(there, here, floor=floor)) <= limit:
        title = name.replace("_", " ")
        yield f"{title} {there:.8g} in the record, {here:.8g} now ({size:.1e}, tolerance {limit:g})"


def _layer_notes(recorded: RecordedSteps, replayed: ReplayedSteps, *, is_same_division: bool) -> Iterator[str]:
    """Yield how many outputs were compared at the first step, and how many are bitwise equal to the record."""
    first = min(recorded.steps)
    there, now = recorded.steps[first].get("layers") or {}, replayed.steps.get(first)
    if now is not None and (here := now.layers):
        common = [name for name in there if name in here and there[name]["positions"] == here[name]["positions"]]
        equal = sum(there[name]["checksum"] == here[name]["checksum"] for name in common)
        bitwise = f", {equal} of them bitwise equal" if is_same_division else ""
        yield f"outputs of {len(common)} of {len(there)} modules compared at step {first}{bitwise}"


def _changes(run: Path, recorded: RecordedSteps, replayed: ReplayedSteps) -> Iterator[str]:
    """Yield the content and the packages that have changed since the run."""
    saved = layout.newest_checkpoint(run / CHECKPOINTS_FOLDER)
    if saved is not None and (manifest := read_entry(saved).manifest) is not None:
        identity = manifest.run.identity
        changed = setting_differences(identity, replayed.fingerprint.identity)
        if contents := [name for name in changed if "." not in name and name in identity]:
            yield f"not the content that the run read: {', '.join(contents)}"
    packages = recorded.environment.get("packages")
    if not isinstance(packages, dict):
        yield "the packages of the run are not known: its environment.json is missing or damaged"
        return
    changes = [
        f"{name} {there} -> {here}" for name, (there, here) in setting_differences(packages, package_versions()).items()
    ]
    yield f"changed since the run: {', '.join(changes)}" if changes else "no package has changed since the run"
