"""`finetune verify replay`: the steps of a recorded run, taken again in the present environment, are still the same."""

import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from finetune.checkpoint.format import layout
from finetune.checkpoint.read.inventory import locate_run, read_entry, select_checkpoint
from finetune.commands.source import with_trust
from finetune.config.load import load_resolved
from finetune.config.run_config import RunConfig
from finetune.errors import UserError
from finetune.report.history import EVENTS_FILE, read_events
from finetune.run.replay import ReplayedSteps, active_dropout, replay_steps, replayed_job
from finetune.run.state.resume import RestoredRun
from finetune.runtime import distributed
from finetune.runtime.environment import package_versions
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER

EventFields = Mapping[str, Any]


@dataclass(frozen=True)
class Tolerance:
    """The largest difference by rounding, relative to the recorded number, or to `floor` where that is larger."""

    loss: float
    gradient_norm: float
    layer_norm: float
    floor: float = 1.0  # of the loss: an error of rounding does not shrink with it


TOLERANCES: Mapping[str, Tolerance] = {
    "fp32": Tolerance(1e-5, 1e-4, 1e-5),
    "tf32": Tolerance(2e-3, 2e-2, 2e-3),
    "fp16": Tolerance(2e-3, 2e-2, 2e-3),
    "bf16": Tolerance(1e-2, 5e-2, 1e-2),
}
"""By what the matrices are multiplied in.

- fp32: sums in another order differ by about 1e-7; over all strategies, worlds and microbatches tried, losses by at
  most 3e-6 in 30 steps, norms ten times that, since positive and negative gradients cancel.
- tf32 and fp16 have 11 bits: an output differs by up to 5e-4; a mean over tokens by less, a norm by more.
- bf16 has 8 bits: 4e-3. fp8 is compared as bf16, in which it sums.
"""

_RATE_TOLERANCE = 1e-12  # computed from the step in float64


@dataclass(frozen=True)
class ReplayRequest:
    """The arguments of the command."""

    run: Path
    num_steps: int = 5
    start: int | None = None  # the step of a checkpoint; None: the model that the run began with
    layers: bool = False
    trust_remote_code: bool = False
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecordedSteps:
    """What a run folder says about these steps, and where they were taken."""

    started: EventFields
    steps: Mapping[int, EventFields]
    environment: Mapping[str, Any]

    @property
    def batch_line(self) -> str:
        """Return the division of a step into processes and microbatches."""
        return _batch_line(self.started)


def run_replay(request: ReplayRequest) -> int:
    """Take the steps again, print the comparison and return the exit code: 1 where something differs. Collective.

    Raises UserError for a run without a record of these steps, or one whose dropout masks are others here.
    """
    run, checkpoint = request.run.expanduser().absolute(), None
    if request.start is not None:
        checkpoint = select_checkpoint(locate_run(run), step=request.start)
    recorded = read_recorded(run, after=request.start or 0, num_steps=request.num_steps)
    if request.layers and not any(step.get("layers") for step in recorded.steps.values()):
        raise UserError(
            f"--layers: {run / EVENTS_FILE} has no layer outputs of steps {min(recorded.steps)} to "
            f"{max(recorded.steps)}. A run records those of its first steps with `run.record_layers: true`."
        )
    loaded = with_trust(load_resolved(run, request.overrides), trust_remote_code=request.trust_remote_code)
    with tempfile.TemporaryDirectory(prefix="finetune-replay-") as scratch:
        job = replayed_job(loaded, folder=Path(scratch), checkpoint=checkpoint, records_layers=request.layers)
        replayed = replay_steps(
            job, num_steps=len(recorded.steps), check=lambda restored: _require_same_masks(recorded, restored)
        )
    code = _judge(run, recorded, replayed, tolerance=tolerance_of(job.config)) if distributed.is_main() else 0
    return distributed.shut_down(distributed.broadcast_object(code))


def read_recorded(run: Path, *, after: int, num_steps: int) -> RecordedSteps:
    """Return the steps after this one from the run's events, and its environment; a repeated step as it was last."""
    path = run / EVENTS_FILE
    if not path.is_file():
        raise UserError(f"{path} does not exist. Give the folder of a run, such as runs/first.")
    started: EventFields = {}
    first: EventFields = {}
    steps = {}
    for event in read_events(path):
        if event["event"] == "RunStarted":
            started = event
        elif event["event"] == "StepTaken" and after < event["step"] <= after + num_steps:
            steps[event["step"]] = event
            first = started if event["step"] == after + 1 else first
    if after + 1 not in steps or not first:
        raise UserError(f"{path}: has no step {after + 1}, so there is nothing to compare.")
    try:
        environment = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        environment = {}
    return RecordedSteps(first, steps, environment if isinstance(environment, dict) else {})


def tolerance_of(config: RunConfig) -> Tolerance:
    """Return the tolerance of the job's coarsest arithmetic."""
    arithmetic = {config.train.precision, {"bfloat16": "bf16", "float16": "fp16"}.get(config.model.dtype, "fp32")}
    if arithmetic & {"bf16", "fp8"}:
        return TOLERANCES["bf16"]
    if "fp16" in arithmetic:
        return TOLERANCES["fp16"]
    return TOLERANCES["tf32" if torch.cuda.is_available() and config.train.tf32 is not False else "fp32"]


def _require_same_masks(recorded: RecordedSteps, restored: RestoredRun) -> None:
    """Raise UserError where dropout is on, and its masks depend on a division of the step that is not the recorded."""
    here, there = restored.built.plan.arithmetic[0].partition(" (")[0], recorded.batch_line
    device = restored.built.prepared.accelerator.device.type
    recorded_on = next((each.get("type") for each in recorded.environment.get("devices", ())), device)
    random_modules = active_dropout(restored)
    if random_modules and (here, device) != (there, recorded_on):
        raise UserError(
            f"replay: dropout is on ({len(random_modules)} places, such as {random_modules[0]}), and its masks depend "
            f"on processes, microbatch and device. Recorded: {there}, on {recorded_on}; here: {here}, on {device}. "
            "Replay with the recorded numbers (`accelerate launch --num_processes N`, `--set train.microbatch_size=N`)."
        )


def _judge(run: Path, recorded: RecordedSteps, replayed: ReplayedSteps, *, tolerance: Tolerance) -> int:
    """Print the steps of both and the first difference with what may explain it; return the exit code."""
    _print_steps(recorded, replayed)
    now = {number: asdict(step) for number, step in replayed.steps.items()}
    groups = list(group_differences(recorded.started.get("parameter_groups") or {}, replayed.started.parameter_groups))
    found = [f"before the first step: parameter groups: {line}" for line in groups]
    for number, step in recorded.steps.items():
        if number not in now:
            found.append(f"step {number} is not part of the job now")
        found += [f"step {number}: {line}" for line in step_differences(step, now.get(number, step), tolerance)]
        layers = list(layer_differences(step.get("layers") or {}, now.get(number, step)["layers"], tolerance))
        found += [f"step {number}: output of {line}" for line in layers[:1]]
        if found:
            break
    same_division = recorded.batch_line == _batch_line(asdict(replayed.started))
    notes = [*_layer_notes(recorded, now, same_division=same_division), *_changes(run, recorded, replayed)]
    if found:
        print("\n".join(["differs", *(f"  {line}" for line in [*found, *notes])]))
        return 1
    print(
        f"equal: {len(now)} steps, samples and learning rates exactly, losses within {tolerance.loss:g}, "
        f"gradient norms within {tolerance.gradient_norm:g}"
    )
    print("\n".join(f"  {line}" for line in notes))
    return 0


def group_differences(recorded: Mapping[str, Mapping[str, int]], now: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Yield every pattern of tensor names whose settings differ; nothing for a run that has not recorded them."""
    if not recorded:
        return
    there, here = _by_pattern(recorded), _by_pattern(now)
    for pattern in {**there, **here}:
        if there.get(pattern) != here.get(pattern):
            yield (
                f"{pattern}: {there.get(pattern, 'not trained')} in the record, {here.get(pattern, 'not trained')} now"
            )


def _by_pattern(groups: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
    patterns = {pattern for counts in groups.values() for pattern in counts}
    return {
        pattern: "; ".join(
            f"{count[pattern]} with {text}" for text, count in sorted(groups.items()) if pattern in count
        )
        for pattern in sorted(patterns)
    }


def step_differences(recorded: EventFields, now: EventFields, tolerance: Tolerance) -> Iterator[str]:
    """Yield what differs between a recorded step and the same one now; of other samples, only that they are others."""
    if recorded["samples_sha256"] != now["samples_sha256"]:
        counts = ", ".join(
            f"{recorded[name]:,} {name.removeprefix('num_')} in the record, {now[name]:,} now"
            for name in ("num_tokens", "num_targets")
        )
        yield f"other samples ({counts})"
        return
    limits = {
        "learning_rate": (_RATE_TOLERANCE, 0.0),
        "loss": (tolerance.loss, tolerance.floor),
        "gradient_norm": (tolerance.gradient_norm, 0.0),
    }
    for name, (limit, floor) in limits.items():
        there, here = float(recorded[name]), float(now[name])
        difference = relative_difference(there, here, floor=floor)
        if not difference <= limit:
            title = name.replace("_", " ")
            yield f"{title} {there:.8g} in the record, {here:.8g} now ({difference:.1e}, tolerance {limit:g})"


def layer_differences(recorded: EventFields, now: EventFields, tolerance: Tolerance) -> Iterator[str]:
    """Yield each module whose output has another norm, in the order of the model; not where padding is counted."""
    for name, values in recorded.items():
        if not now:
            return
        if name not in now:
            yield f"{name}: recorded, and the model has no such module now"
        elif values["positions"] == now[name]["positions"]:
            differences = {
                norm: relative_difference(float(values[norm]), float(now[name][norm]))
                for norm in ("norm", "projected_norm")
            }
            norm = max(differences, key=lambda norm: differences[norm])
            if not differences[norm] <= tolerance.layer_norm:
                yield (
                    f"{name}: {norm.replace('_', ' ')} {values[norm]:.8g} in the record, {now[name][norm]:.8g} now "
                    f"({differences[norm]:.1e}, tolerance {tolerance.layer_norm:g})"
                )


def relative_difference(recorded: float, now: float, *, floor: float = 0.0) -> float:
    """Return the difference relative to the recorded number, or to the floor; 0 for two that are not finite alike."""
    if recorded == now or (math.isnan(recorded) and math.isnan(now)):
        return 0.0
    return abs(recorded - now) / max(abs(recorded), floor, 1e-30)


def _layer_notes(recorded: RecordedSteps, now: Mapping[int, EventFields], *, same_division: bool) -> Iterator[str]:
    """Yield how many outputs were compared at the first step, and how many are bitwise those of the record."""
    first = min(recorded.steps)
    there, here = recorded.steps[first].get("layers") or {}, now[first]["layers"] if first in now else {}
    if not there or not here:
        return
    common = [name for name in there if name in here]
    compared = [name for name in common if there[name]["positions"] == here[name]["positions"]]
    equal = sum(there[name]["checksum"] == here[name]["checksum"] for name in common)
    bitwise = f", {equal} of them bitwise equal" if same_division else ""
    yield f"outputs of {len(compared)} of {len(there)} modules compared at step {first}{bitwise}"


def _changes(run: Path, recorded: RecordedSteps, replayed: ReplayedSteps) -> Iterator[str]:
    """Yield the content and the packages that have changed since the run."""
    saved = layout.newest_checkpoint(run / CHECKPOINTS_FOLDER)
    manifest = read_entry(saved).manifest if saved is not None else None
    if manifest is not None:
        there, here = manifest.run.identity, replayed.fingerprint.identity
        contents = [name for name in there if "." not in name and name in here and there[name] != here[name]]
        if contents:
            yield f"not the content that the run read: {', '.join(contents)}"
    versions, now = recorded.environment.get("packages", {}), package_versions()
    changed = [
        f"{name} {versions.get(name, 'not installed')} -> {now.get(name, 'not installed')}"
        for name in dict.fromkeys([*versions, *now])
        if versions.get(name) != now.get(name)
    ]
    yield f"changed since the run: {', '.join(changed)}" if changed else "no package has changed since the run"


def _batch_line(started: EventFields) -> str:
    lines = started.get("arithmetic") or ("",)
    return str(lines[0]).partition(" (")[0]


def _print_steps(recorded: RecordedSteps, replayed: ReplayedSteps) -> None:
    print(f"recorded: {recorded.started.get('strategy')}; now: {replayed.started.strategy}")
    print("step        loss         now  difference  gradient norm         now  difference")
    for number, there in recorded.steps.items():
        if (here := replayed.steps.get(number)) is not None:
            (loss, loss_now), (norm, norm_now) = (
                (float(there[name]), float(getattr(here, name))) for name in ("loss", "gradient_norm")
            )
            print(
                f"{number:>4}  {loss:>10.6f}  {loss_now:>10.6f}  {relative_difference(loss, loss_now):>10.1e}  "
                f"{norm:>13.6f}  {norm_now:>10.6f}  {relative_difference(norm, norm_now):>10.1e}"
            )
