"""What must hold whatever befalls a run. Each function returns what does not, in sentences."""

import re
from collections.abc import Iterator
from pathlib import Path

from tests.faults.evidence import LATE, Attempted, History, Run, Step, all_steps, state_digest
from tests.faults.schedule import ALL, LAUNCHER, STEPS, Attempt, Fault

TOLERANCE = 1e-4
"""Of losses at another place."""

_MESSAGE = re.compile(r"^(?:\[rank \d+\] )?error: ", re.MULTILINE)

_MAX_STEPS = 3
"""That are listed, of those that differ."""

TRACEBACK = "Traceback (most recent call last)"


def attempt_violations(ended: Attempted, attempt: Attempt, *, log: Path) -> list[str]:
    """Return what is wrong with how an attempt began and ended, whatever befell it."""
    return [f"{problem}  [{log}]" for problem in _attempt_problems(ended, attempt)]


def _attempt_problems(ended: Attempted, attempt: Attempt) -> Iterator[str]:
    if ended.code == LATE:
        yield f"did not end within {ended.seconds:.0f} s; running: {'; '.join(ended.orphans)}"
        return
    if ended.orphans:
        yield f"left {len(ended.orphans)} processes running: {'; '.join(ended.orphans)}"
    if ended.started_at is not None and ended.started_at != ended.step_before:
        yield f"began at step {ended.started_at}, and the newest valid checkpoint was of step {ended.step_before}"
    if ended.torn:
        yield f"checkpoints that nobody has damaged are not whole: {', '.join(ended.torn)}"
    if ended.trusted:
        yield f"did not set aside, or did not name, the damaged {', '.join(ended.trusted)}"
    yield from (f"printed a traceback: {_last_line(each)}" for each in _tracebacks(ended.output))
    yield from _message_problems(ended, attempt)


def _message_problems(ended: Attempted, attempt: Attempt) -> Iterator[str]:
    """Yield what is wrong with what an attempt says of its end."""
    if ended.code == 0 and (problem := finish_problem(ended)):
        yield problem
    if ended.code == 0 or is_beyond_words(ended, attempt):
        return
    state, error = ended.status.get("state"), ended.status.get("error")
    said = len(_MESSAGE.findall(ended.output))
    if not ended.status and said == 1 and any("full disk" in fault for fault in ended.struck):
        return  # there was never room for the file
    if state not in ("stopped", "failed"):
        yield f"ended with exit code {ended.code}, and status.json says `{state}`"
    if state == "failed" and not (error or {}).get("message"):
        yield "failed, and status.json does not say why"
    if state == "failed" and ended.status.get("exit_code") not in (1, 2):
        yield f"failed with exit code {ended.status.get('exit_code')}"
    if state == "failed" and said != 1 and not _cannot_print(ended):
        yield f"failed, and printed {said} messages"
    if not ended.struck:
        yield f"ended with exit code {ended.code} though nothing befell it: {_last_error(ended.output)}"


def is_beyond_words(ended: Attempted, attempt: Attempt) -> bool:
    """Tell whether the fault has left nobody who could say how it ended."""
    return any(_leaves_nobody(fault, attempt) for fault in attempt.faults if str(fault) in ended.struck)


def _leaves_nobody(fault: Fault, attempt: Attempt) -> bool:
    """Tell whether all have gone at once, or the ranks may not yet heed signals or know of one another."""
    is_early = fault.moment.step == 0
    is_of_all = attempt.place.ranks == 1 or fault.target in (ALL, LAUNCHER)
    return (fault.kind == "kill" and (is_of_all or is_early)) or (fault.kind == "terminate" and is_early)


def _cannot_print(ended: Attempted) -> bool:
    """Tell whether a limit on files has hit what the processes print, too."""
    return any("file limit" in fault for fault in ended.struck)


def is_refused(ended: Attempted) -> bool:
    """Tell whether it was a clear stop before any training, of the kind that the user can fix."""
    return ended.code != 0 and ended.started_at is None and ended.status.get("exit_code", ended.code) == 2


def finish_problem(ended: Attempted) -> str | None:
    """Return what is missing of a run that says it has finished."""
    state, step = ended.status.get("state"), ended.status.get("step")
    if ended.code != 0:
        return f"ended with exit code {ended.code}: {_last_error(ended.output)}"
    if (state, step) != ("finished", STEPS):
        return f"ended with exit code 0, and status.json says `{state}` at step {step}"
    return None


def end_violations(run: Run, ended: Attempted, *, reference: Run, is_exact: bool) -> list[str]:
    """Return how a run whose last attempt was left in peace differs from the undisturbed one."""
    if (problem := finish_problem(ended)) is not None:
        return [f"did not reach its end: {problem}"]
    return run_violations(run, reference=reference, is_exact=is_exact)


def run_violations(run: Run, *, reference: Run, is_exact: bool, num_steps: int = STEPS) -> list[str]:
    """Return how a finished run differs from the undisturbed one, and what it has left behind."""
    history, wanted = History.of(run.events()), History.of(reference.events())
    every = list(range(1, num_steps + 1))
    assert sorted(wanted.steps) == every, "the undisturbed run is none"
    found = [f"left {name}" for name in run.leftovers()] + list(history.problems)
    if sorted(history.steps) != every:
        found.append(f"not every step was taken: {sorted(set(every) - set(history.steps))} are missing")
    taken = all_steps(run.events())
    found += list(dict.fromkeys(_step_problems(taken, wanted, is_exact=is_exact)))[:_MAX_STEPS]
    return found + list(_result_problems(run, reference, is_exact=is_exact))


def _step_problems(taken: Iterator[tuple[int, Step]], wanted: History, *, is_exact: bool) -> Iterator[str]:
    """Yield where a step was another one than in the undisturbed run, also one that was taken again later."""
    for number, step in taken:
        there = wanted.steps[number]
        if step.samples != there.samples:
            yield f"step {number} took other samples"
        if is_exact and step != there:
            yield f"step {number} has loss {step.loss} and norm {step.norm} instead of {there.loss} and {there.norm}"
        elif abs(step.loss - there.loss) > TOLERANCE:
            yield f"step {number} has loss {step.loss} instead of {there.loss}"


def _result_problems(run: Run, reference: Run, *, is_exact: bool) -> Iterator[str]:
    newest, wanted = run.newest_whole(), reference.newest_whole()
    assert wanted is not None
    if newest is None or newest.name != wanted.name:
        yield f"the last valid checkpoint is {newest and newest.name} instead of {wanted.name}"
    elif is_exact and state_digest(newest) != state_digest(wanted):
        yield "the final state has another digest than the undisturbed run's"
    if is_exact and _weights(run) != _weights(reference):
        yield "the exported weights are others than the undisturbed run's"
    if not _weights(run):
        yield "no model was exported"


def _weights(run: Run) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((run.folder / "final").glob("*.safetensors"))}


def summary(ended: Attempted) -> str:
    """Return in a few words how an attempt ended."""
    state, reason = ended.status.get("state"), ended.status.get("reason")
    error = (ended.status.get("error") or {}).get("type")
    words = [str(state), f"at step {ended.status.get('step')}", f"({reason or error})" if reason or error else ""]
    return f"{' '.join(filter(None, words))}, exit code {ended.code}, {ended.seconds:.1f} s"


def _last_error(output: str) -> str:
    lines = [line for line in output.splitlines() if "error" in line.lower()]
    return (lines or output.splitlines() or [""])[-1][:400]


def _tracebacks(output: str) -> list[str]:
    """Return the tracebacks of our processes; a launcher's, whose ranks have failed, is none of ours."""
    return [block for block in output.split(TRACEBACK)[1:] if "accelerate/commands/launch.py" not in block[:1500]]


def _last_line(block: str) -> str:
    rest = [line for line in block.splitlines()[1:] if line]
    return next((line for line in rest if not line.startswith((" ", "["))), rest[-1] if rest else "")[:300]
