"""The ranks of this process, for every launcher."""

import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from zlib import crc32

from finetune.errors import UserError

LOCALHOST = "127.0.0.1"

SINGLE_LAUNCH = ("ACCELERATE_USE_CPU", "ACCELERATE_DYNAMO_BACKEND")
"""Variables that `accelerate launch` sets, without a rank, for the one process of `distributed_type: NO`."""

_FIRST_PORT, _NUM_PORTS = 15000, 17000  # below the ephemeral ports of Linux


@dataclass(frozen=True)
class Ranks:
    """The ranks of a process among all that were started together."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str  # of the host of rank 0
    port: int
    source: str  # the launcher, for messages

    def variables(self) -> dict[str, str]:
        """Return the variables that torchrun would set."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }

    def __str__(self) -> str:
        return f"{self.world} processes by {self.source}; rank 0 is at {self.address}:{self.port}"


def free_port() -> int:
    """Return a TCP port that is free right now."""
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


def is_launched(variables: Mapping[str, str]) -> bool:
    """Return whether `accelerate launch`, torchrun or a script of the user has set the ranks."""
    return "RANK" in variables or all(name in variables for name in SINGLE_LAUNCH)


OWN_RUN_ID = "finetune-"
"""How TORCHELASTIC_RUN_ID begins in ranks that `finetune train --processes` has started."""


def make_ranks(
    variables: Mapping[str, str],
    names: Mapping[str, str],
    *,
    local_world: int,
    address: str,
    job: str,
    source: str,
) -> Ranks:
    """Return the ranks that the variables of these `names` (rank, world, local_rank) give.

    MASTER_ADDR and MASTER_PORT are used if they are set. Otherwise the port follows from `job`, a name that all
    processes of one launch share. Raises UserError for numbers that contradict each other.
    """
    rank, world, local_rank = (read_count(variables, names[name]) for name in ("rank", "world", "local_rank"))
    if not (rank < world and local_rank < local_world <= world):
        raise UserError(
            f"{source}: {names['rank']}={rank}, {names['world']}={world}, {names['local_rank']}={local_rank} and "
            f"{local_world} processes on this host contradict each other. Start with torchrun or accelerate launch."
        )
    has_port = bool(variables.get("MASTER_PORT"))
    port = read_count(variables, "MASTER_PORT") if has_port else _FIRST_PORT + crc32(job.encode()) % _NUM_PORTS
    return Ranks(rank, world, local_rank, local_world, variables.get("MASTER_ADDR") or address, port, source)


def read_count(variables: Mapping[str, str], name: str) -> int:
    """Return the number in this variable, at least 0. Raises UserError."""
    value = variables.get(name, "")
    if not (value.isascii() and value.isdigit()):
        problem = f"is {value!r}, not a number" if value else "is missing"
        raise UserError(f"the variable {name} {problem}.")
    return int(value)


TORCHRUN_DEFAULTS = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
"""Defaults of torchrun: one thread for each process, and an error where a collective hangs."""


def find_ranks(variables: Mapping[str, str]) -> Ranks | None:
    """Return the ranks that `srun` or `mpirun` gave this process; None if it is alone or RANK is set. Raises UserError.

    MPI comes first: on several hosts of a Slurm job, `mpirun` itself is started by `srun`.
    """
    require_readable_ranks(variables)
    if is_launched(variables):
        return None
    for flavor, names in _MPI_VARIABLES.items():
        if names["rank"] not in variables or names["local_rank"] not in variables:
            continue
        source = f"mpirun ({flavor})"
        world, local_world = (read_count(variables, names[name]) for name in ("world", "local_world"))
        if world == 1:
            break
        if local_world < world and not variables.get("MASTER_ADDR"):  # MPI sets no variable with the host of rank 0
            raise UserError(
                f"{source} on several hosts: MASTER_ADDR is not set. Give all processes the name of the first host: "
                "mpirun -x MASTER_ADDR=HOST (Hydra: -genv MASTER_ADDR HOST)."
            )
        job = next((variables[name] for name in _JOB_NAMES if name in variables), "")
        return make_ranks(variables, names, local_world=local_world, address=LOCALHOST, job=job, source=source)
    ranks = slurm_ranks(variables)
    if ranks is None and read_count({"WORLD_SIZE": "1", **variables}, "WORLD_SIZE") > 1:
        require_readable_ranks({"RANK": "", **variables})
    return ranks


def require_readable_ranks(variables: Mapping[str, str]) -> None:
    """Raise UserError where torch's variables are not the ranks of one process, or some of them are missing."""
    own = [name for name in _RANK_VARIABLES if name in variables]
    try:
        counts = {name: read_count(variables, name) for name in own}
        if counts.get("WORLD_SIZE", 1) > 1 and "RANK" in variables:
            for name in ("RANK", "LOCAL_RANK", "MASTER_PORT"):
                counts[name] = read_count(variables, name)
            if not variables.get("MASTER_ADDR"):
                raise UserError("the variable MASTER_ADDR is missing.")
        if counts.get("RANK", 0) >= counts.get("WORLD_SIZE", 1):
            raise UserError(f"RANK={counts['RANK']} is not a rank of {counts.get('WORLD_SIZE', 1)} processes.")
    except UserError as error:
        unset = " ".join(f"-u {name}" for name in own)
        raise UserError(
            f"{error} A launcher sets all of {', '.join(_RANK_VARIABLES)}, MASTER_ADDR and MASTER_PORT. Where none "
            f"has started this process, unset what an earlier one left: `env {unset} finetune ...`."
        ) from error


_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def adopt_ranks(variables: MutableMapping[str, str]) -> Ranks | None:
    """Set PyTorch's variables where `srun` or `mpirun` has started several processes, and return the ranks.

    Call it before torch is imported, which reads OMP_NUM_THREADS. Raises UserError.
    """
    ranks = find_ranks(variables)
    if ranks is not None:
        variables.update(ranks.variables())
        for name, value in TORCHRUN_DEFAULTS.items():
            variables.setdefault(name, value)
    return ranks


_MPI_VARIABLES = {
    "Open MPI": {
        "rank": "OMPI_COMM_WORLD_RANK",
        "world": "OMPI_COMM_WORLD_SIZE",
        "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
        "local_world": "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    "Hydra": {
        "rank": "PMI_RANK",
        "world": "PMI_SIZE",
        "local_rank": "MPI_LOCALRANKID",  # not set by srun --mpi=pmi2, which sets the two above
        "local_world": "MPI_LOCALNRANKS",
    },
}

_JOB_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
"""Variables with a unique name of the launch, which all its processes share."""


_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Steps with such numbers are a batch script, the shell of `salloc` or the like, not a step of `srun` (slurm.h)."""

_NAMES = {"rank": "SLURM_PROCID", "world": "SLURM_STEP_NUM_TASKS", "local_rank": "SLURM_LOCALID"}


def slurm_ranks(variables: Mapping[str, str]) -> Ranks | None:
    """Return the ranks of this task; None if it is alone, or was not started by `srun`.

    The variables of a step decide, never the job's: in a batch script SLURM_PROCID is 0 and SLURM_NTASKS is the
    requested number, though one process runs. Raises UserError for a step whose variables cannot be read.
    """
    step = variables.get("SLURM_STEP_ID", "")
    if not step.isdigit() or int(step) >= _FIRST_SPECIAL_STEP:
        return None
    if "SLURM_STEP_NUM_TASKS" not in variables or read_count(variables, "SLURM_STEP_NUM_TASKS") == 1:
        return None
    job = f"{variables.get('SLURM_JOB_ID', '')}.{step}"
    host = read_count(variables, "SLURM_NODEID")
    counts = tasks_per_host(variables.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if host >= len(counts):
        raise UserError(f"SLURM_NODEID={host}, and SLURM_STEP_TASKS_PER_NODE has {len(counts)} hosts.")
    local_world = counts[host]
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
    """Return the first host of a list as Slurm writes it; raises UserError for an invalid list.

    >>> first_host("rack[2-3,7]node[001-128],gpu9"), first_host("login1,gpu[1-4]")
    ('rack2node001', 'login1')
    """
    first = re.match(rf"(?:[\w.-]+|{_BRACKETS})+(?=,|$)", hosts, re.ASCII)
    if first is None:
        raise UserError(
            f"SLURM_STEP_NODELIST={hosts}: not a list of hosts. Set MASTER_ADDR to the host of the first task."
        )
    return re.sub(_BRACKETS, lambda bracket: bracket[1], first[0])


_BRACKETS = r"\[(\d+)(?:[-x]\d+)?(?:,\d+(?:[-x]\d+)?)*\]"
"""`[001-003,7]`, and `[000x133]` for a block of a grid."""


def tasks_per_host(counts: str) -> list[int]:
    """Return the number of tasks on each host, as Slurm writes it; raises UserError for an invalid list.

    >>> tasks_per_host("8(x3),4")
    [8, 8, 8, 4]
    """
    counts_by_host: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part, re.ASCII)
        if match is None:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE={counts}: not a list of numbers. Set RANK and the others.")
        counts_by_host += [int(match[1])] * int(match[2] or 1)
    return counts_by_host
