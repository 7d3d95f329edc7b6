"""What the run itself wrote down, in its `status.json`: how far it is, and whether its error is one to try again."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.launch.supervisor.members import Attempt

_USER_MISTAKE = 2


@dataclass(frozen=True)
class RunStatus:
    """How far the run is, and what only the user can fix."""

    checkpoint_step: int = 0
    user_mistake: str | None = None


def read_run_status(run_folder: Path, attempt: Attempt | None) -> RunStatus:
    """Return the status; an error counts if it is of this attempt. Nothing where there is none, or it is damaged."""
    try:
        facts = json.loads((run_folder / "status.json").read_text(encoding="utf-8"))
        return RunStatus(_newest_step(run_folder), _mistake(facts, attempt))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return RunStatus(_newest_step(run_folder))


def _newest_step(run_folder: Path) -> int:
    steps = [path.name.removeprefix("step-") for path in run_folder.glob("checkpoints/step-*")]
    return max((int(step) for step in steps if step.isdecimal()), default=0)


def _mistake(facts: dict[str, Any], attempt: Attempt | None) -> str | None:
    if attempt is None or facts["exit_code"] != _USER_MISTAKE or not facts["error"]:
        return None
    is_of_attempt = len(attempt.hosts) == 1 or facts["launch"].startswith(f"{attempt.addresses[0]}:{attempt.port}:")
    return str(facts["error"]["message"]) if is_of_attempt else None
