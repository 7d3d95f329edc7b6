"""The ranks of the tasks of a Slurm step, from what `srun` sets for each of them."""

import re
from collections.abc import Mapping

from finetune.errors import UserError
from finetune.launch.ranks.started import LOCALHOST, Ranks, make_ranks, read_count

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Steps with such numbers are a batch script, the shell of `salloc` or the like, and no step of `srun` (slurm.h)."""

_NAMES = {"rank": "SLURM_PROCID", "world": "SLURM_STEP_NUM_TASKS", "local_rank": "SLURM_LOCALID"}


def slurm_ranks(variables: Mapping[str, str]) -> Ranks | None:
    """Return the ranks of this task; None for one that is alone, and where `srun` has not started it.

    The variables of a step decide, never those of the job: in a batch script SLURM_PROCID is 0 and SLURM_NTASKS is what
    was asked for, though one process runs. Raises UserError for a step whose variables cannot be read.
    """
    step = variables.get("SLURM_STEP_ID", "")
    if not step.isdigit() or int(step) >= _FIRST_SPECIAL_STEP:
        return None
    if "SLURM_STEP_NUM_TASKS" not in variables or read_count(variables, "SLURM_STEP_NUM_TASKS") == 1:
        return None
    job = f"{variables.get('SLURM_JOB_ID', '')}.{step}"
    local_world = _tasks_here(variables)
    is_one_host = local_world == read_count(variables, "SLURM_STEP_NUM_TASKS")
    return make_ranks(
        variables,
        _NAMES,
        local_world=local_world,
        address=LOCALHOST if is_one_host else first_host(variables.get("SLURM_STEP_NODELIST", "")),
        job=job,
        source=f"srun (step {job})",
    )


def first_host(hosts: str) -> str:
    """Return the first host of a list as Slurm writes it; raises UserError for one that is none.

    >>> first_host("rack[2-3,7]node[001-128],gpu9"), first_host("login1,gpu[1-4]")
    ('rack2node001', 'login1')
    """
    first = re.match(rf"(?:[\w.-]+|{_BRACKETS})+(?=,|$)", hosts, re.ASCII)
    if first is None:
        raise UserError(
            f"SLURM_STEP_NODELIST={hosts}: not a list of hosts. Set MASTER_ADDR to the host of the first task."
        )
    return re.sub(_BRACKETS, lambda found: found[1], first[0])


_BRACKETS = r"\[(\d+)(?:[-x]\d+)?(?:,\d+(?:[-x]\d+)?)*\]"
"""`[001-003,7]`, and `[000x133]` for a block of a grid."""


def tasks_per_host(counts: str) -> list[int]:
    """Return the number of tasks on each host, as Slurm writes it; raises UserError for what is no such list.

    >>> tasks_per_host("8(x3),4")
    [8, 8, 8, 4]
    """
    found: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part, re.ASCII)
        if match is None:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE={counts}: not a list of numbers. Set RANK and the others.")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _tasks_here(variables: Mapping[str, str]) -> int:
    host = read_count(variables, "SLURM_NODEID")
    counts = tasks_per_host(variables.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if host >= len(counts):
        raise UserError(f"SLURM_NODEID={host}, and SLURM_STEP_TASKS_PER_NODE has {len(counts)} hosts.")
    return counts[host]
